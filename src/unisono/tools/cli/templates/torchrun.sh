#!/bin/bash
# Trains train.py by torchrun.
#
#   one host        bash torchrun.sh
#   several hosts   on each of them, with its own NODE (0, 1, ...) and the same of everything else:
#                   NODES=2 NODE=0 HEAD=10.1.1.20 UNISONO_SECRET=... bash torchrun.sh
#
# In train.py, un.init() finds its place by itself. Other arguments are passed on to train.py.

set -euo pipefail

# Ranks on each host; with GPUs, as many as those.
ranks="${RANKS:-2}"
nodes="${NODES:-1}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

if [ "$nodes" -eq 1 ]; then
    # A port that is free; a rank that dies is restarted up to RESTARTS times, and so are all others.
    exec torchrun --standalone --nproc-per-node "$ranks" --max-restarts "${RESTARTS:-0}" train.py "$@"
fi

# The address of the host with NODE=0, by which the others reach it; not a name that leads to 127.0.0.1.
: "${HEAD:?set HEAD to the address of the host with NODE=0}"
: "${NODE:?set NODE to the number of this host, from 0 to $((nodes - 1))}"
# By this the ranks know each other: the same random text on every host.
: "${UNISONO_SECRET:?set UNISONO_SECRET to what 'openssl rand -hex 32' prints, the same on every host}"
export UNISONO_SECRET

exec torchrun --nnodes "$nodes" --node-rank "$NODE" --nproc-per-node "$ranks" \
    --master-addr "$HEAD" --master-port "${PORT:-29400}" train.py "$@"
