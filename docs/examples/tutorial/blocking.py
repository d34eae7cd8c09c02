"""Blocking point-to-point: rank 0 counts up, and rank 1 gets the result.

python docs/examples/tutorial/blocking.py --ranks 2 --backend gloo
"""

from __future__ import annotations

import argparse

import torch

import unisono as un


def run(comm: un.Communicator) -> float:
    tensor = torch.zeros(1)
    if comm.rank == 0:
        tensor += 1
        # Returns when the tensor may be changed again; not before rank 1 receives, on some backends.
        comm.send(tensor, dst=1)
    elif comm.rank == 1:
        comm.recv(tensor, src=0)
    print(f"rank {comm.rank} has {tensor[0]}")
    return tensor.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="gloo")
    given = parser.parse_args()
    un.launch(run, nprocs=given.ranks, backend=given.backend)
