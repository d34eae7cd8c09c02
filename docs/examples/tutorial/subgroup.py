"""An all-reduce in a sub-group: ranks 0 and 1 add up their tensors, and the others take no part."""

from __future__ import annotations

import argparse

import torch

import unisono as un


def run(comm: un.Communicator) -> float:
    # Every rank calls it; a rank that is not in the list gets None.
    group = comm.subgroup([0, 1])
    tensor = torch.ones(1)
    if group is not None:
        group.all_reduce(tensor, op="sum")
        group.close()
    print(f"rank {comm.rank} has {tensor[0]}")
    return tensor.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="gloo")
    given = parser.parse_args()
    un.launch(run, nprocs=given.ranks, backend=given.backend)
