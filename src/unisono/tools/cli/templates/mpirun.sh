#!/bin/bash
# Trains train.py by mpirun, Open MPI's or MPICH's:   bash mpirun.sh
#
# In train.py, un.init() finds its place by itself; un.init("mpi") has MPI carry the tensors too, and
# un.init("gloo") or un.init("nccl") only asks MPI who is who. Arguments are passed on to train.py.

set -euo pipefail

# Ranks, on all hosts together; with GPUs, one for each.
ranks="${RANKS:-2}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# By this the ranks know each other; mpirun passes it on.
UNISONO_SECRET="${UNISONO_SECRET:-$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')}"
export UNISONO_SECRET

options=()
if [ -n "${HOSTFILE:-}" ]; then
    # Open MPI: a line "host0 slots=2" for each host. MPICH: "host0:2".
    options+=(--hostfile "$HOSTFILE")
fi
case "$(mpirun --version 2>&1)" in
*"Open MPI"* | *OpenRTE*)
    # Open MPI passes on only what it is told to, and binds each rank to one core unless it is told not to.
    options+=(-x UNISONO_SECRET -x OMP_NUM_THREADS --bind-to none)
    # In a container there is only root, and Open MPI wants to be asked twice:
    # export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    ;;
esac

exec mpirun -n "$ranks" ${options[@]+"${options[@]}"} python train.py "$@"
