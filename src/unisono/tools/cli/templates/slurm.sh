#!/bin/bash
# Trains train.py on the nodes of a Slurm cluster:   sbatch slurm.sh
#
# In train.py, un.init() finds its place by itself: every task that srun starts is a rank, and they meet
# on the first node. What follows "sbatch slurm.sh" is passed on to train.py.

#SBATCH --job-name=train
#SBATCH --nodes=2
# Ranks on each node; with GPUs, as many as those.
#SBATCH --ntasks-per-node=2
# Cores of each rank: its torch threads, and the workers of its DataLoader.
#SBATCH --cpus-per-task=4
# With GPUs, take one # away:
##SBATCH --gpus-per-node=2
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out

set -euo pipefail

# By this the ranks know each other. srun passes it on; nobody else can read it.
UNISONO_SECRET=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
export UNISONO_SECRET

export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"

# The port is 15000 + (job + 1009 * step) mod 16384. If that is taken or closed, name another one:
# export MASTER_PORT=29500

# Ranks with MPI, un.init("mpi"), also need: --mpi=pmix
srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" python train.py "$@"
