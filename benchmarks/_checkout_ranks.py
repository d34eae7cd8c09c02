"""Ranks of a `Checkout`, run by path: they use only public functions, so that any version of unisono works.

python -P _checkout_ranks.py ADDRESS RANKS BACKEND
"""

from __future__ import annotations

import json
import socket
import sys
import time
from itertools import cycle, islice
from typing import Any

import torch

import unisono as un

__all__ = ["rank"]


def rank(comm: un.Communicator, address: str) -> None:
    """Take samples until the peer closes the connection."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        with connection.makefile("rw") as link:
            _answer(link, un.__file__)
            current, tensors = "", cycle(list[torch.Tensor]())
            for line in link:
                case = json.loads(line)
                if line != current:
                    # Free the old tensors first: those of two cases may not fit into memory.
                    tensors = cycle(())
                    current, tensors = line, cycle(_verified(comm, case))
                _answer(link, _seconds(comm, list(islice(tensors, case["calls"]))))


def _verified(comm: un.Communicator, case: dict[str, Any]) -> list[torch.Tensor]:
    """Create the tensors of a case, and reduce each once; they are zeroed afterwards, so that no sum grows."""
    dtype = getattr(torch, case["dtype"])
    numel = max(1, case["nbytes"] // dtype.itemsize)
    make = comm.empty if case["registered"] else torch.empty
    tensors = [make(numel, dtype=dtype) for _ in range(case["tensors"])]
    for tensor in tensors:
        tensor.fill_(comm.rank + 1)
        comm.all_reduce(tensor)
        assert bool((tensor == comm.size * (comm.size + 1) // 2).all()), "a sum is wrong"
        tensor.zero_()
    return tensors


def _seconds(comm: un.Communicator, tensors: list[torch.Tensor]) -> float:
    comm.barrier()
    began = time.perf_counter()
    for tensor in tensors:
        comm.all_reduce(tensor)
    seconds = (time.perf_counter() - began) / len(tensors)
    comm.barrier()
    return seconds


def _answer(link: Any, value: object) -> None:
    link.write(json.dumps(value) + "\n")
    link.flush()


if __name__ == "__main__":
    un.launch(rank, int(sys.argv[2]), sys.argv[3], (sys.argv[1],), threads=1)
