"""Immediate point-to-point: start a message, do something else, then wait for it."""

from __future__ import annotations

import argparse

import torch

import unisono as un


def run(comm: un.Communicator) -> float:
    tensor = torch.zeros(1)
    work = None
    if comm.rank == 0:
        tensor += 1
        work = comm.isend(tensor, dst=1)
        print("rank 0 has started to send")
    elif comm.rank == 1:
        work = comm.irecv(tensor, src=0)
        print("rank 1 has started to receive")
    # Until `wait` returns, the sender must not write to the tensor, nor the receiver look at it.
    if work is not None:
        work.wait()
    print(f"rank {comm.rank} has {tensor[0]}")
    return tensor.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="gloo")
    given = parser.parse_args()
    un.launch(run, nprocs=given.ranks, backend=given.backend)
