"""Test ranks in a process that may die.

    python -m unisono.tools.doctor.smoke_test BACKENDS [--meet URL --rank I --size N]

Without an address it starts two ranks itself; with an address, or with "mpi", it is a rank. Prints a line of JSON for
each backend.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch

import unisono as un

__all__ = ["main", "summed"]

_COUNT = 1000
_TIMEOUT_S = 30.0
_LARGE_BYTES = 1 << 20
_SMALL_CALLS, _LARGE_CALLS = 20, 5


def summed(comm: un.Communicator) -> dict[str, Any]:
    """Sum numbers over the ranks; check the sum and time it.

    Returns:
        right: Whether the sum is right. small_s, large_s: Median seconds for 8 bytes and for 1 MiB.
    """
    tensor = torch.arange(_COUNT, dtype=torch.float64, device=comm.device) + comm.rank
    comm.all_reduce(tensor)
    offset = comm.size * (comm.size - 1) / 2
    expected = torch.arange(_COUNT, dtype=torch.float64) * comm.size + offset
    small = torch.ones(1, dtype=torch.float64, device=comm.device)
    large = torch.ones(_LARGE_BYTES // 4, device=comm.device)
    return {
        "right": torch.equal(tensor.cpu(), expected),
        "size": comm.size,
        "small_s": _median(comm, small, _SMALL_CALLS),
        "large_s": _median(comm, large, _LARGE_CALLS),
    }


def _median(comm: un.Communicator, tensor: torch.Tensor, calls: int) -> float:
    seconds = []
    for _ in range(calls):
        began = time.perf_counter()
        comm.all_reduce(tensor, "max")
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def main(argv: list[str] | None = None) -> int:
    """Test each backend, and print "backend" with the result of `summed`, or with "error" and a sentence."""
    parser = argparse.ArgumentParser()
    parser.add_argument("backends", nargs="+")
    parser.add_argument("--meet")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--size", type=int)
    parser.add_argument(
        "--deadline", type=float, help="deadline in seconds of time.time(); half a minute from now if left out"
    )
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    failed = False
    for backend in given.backends:
        try:
            result = _result(backend, given)
        # Any error is a result of the test.
        except Exception as error:
            failed, result = True, {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps({"backend": backend, **result}) + "\n")
        sys.stdout.flush()
    return int(failed)


def _result(backend: str, given: argparse.Namespace) -> dict[str, Any]:
    timeout = _TIMEOUT_S if given.deadline is None else max(1.0, given.deadline - time.time())
    if given.meet is None and backend != "mpi":
        return dict(un.launch(summed, 2, backend, timeout=timeout)[0])
    with un.init(backend, init_method=given.meet, rank=given.rank, world_size=given.size, timeout=timeout) as comm:
        return summed(comm)


if __name__ == "__main__":
    sys.exit(main())
