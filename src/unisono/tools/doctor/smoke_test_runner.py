"""Smoke test: runs this module in separate processes, which compute sums, and converts their output to findings."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import timeit
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import unisono as un
from unisono.tools.doctor.examination import Finding, ok, problem
from unisono.tools.doctor.subprocesses import CompletedRun, clean_environment, run

__all__ = ["main", "summed", "tried"]

# The test gives up this many seconds before its time limit, so that it can report what it was waiting for instead of
# being killed.
_LAST_WORDS_S = 4.0


def tried(
    fixes: Mapping[str, str],
    limit_s: float,
    options: Sequence[str] = (),
    before: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> list[Finding]:
    """Run the smoke test for each backend. Return "ok" if the ranks' sum is right, else a "problem" with the reason.

    Args:
        fixes: Backends in the order of tests, each with a fix to suggest if its test fails.
        limit_s: Total time limit in seconds.
        options: Options of the test's command line.
        before: Prefix of the command, such as mpiexec and its options.
        environment: Environment of the ranks; if None, this process's environment without its launcher's variables.
    """
    # Pass the deadline as wall-clock time, so that it includes the time to start Python and import torch.
    deadline = str(time.time() + limit_s - _LAST_WORDS_S)
    command = [
        *before,
        sys.executable,
        "-m",
        "unisono.tools.doctor.smoke_test_runner",
        *fixes,
        *options,
        "--deadline",
        deadline,
    ]
    ended = run(command, limit_s, clean_environment(OMP_NUM_THREADS="1") if environment is None else environment)
    results = _results(ended)
    return [_judged(backend, results.get(backend, []), ended, fix) for backend, fix in fixes.items()]


def _results(ended: CompletedRun) -> dict[str, list[dict[str, Any]]]:
    """Return each rank's result by backend. Ignore output lines that are not results."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in ended.out.splitlines():
        try:
            result = json.loads(line)
        except ValueError:
            continue
        if isinstance(result, dict) and "backend" in result:
            found.setdefault(result["backend"], []).append(result)
    return found


def _judged(backend: str, results: Sequence[dict[str, Any]], ended: CompletedRun, fix: str) -> Finding:
    errors = [one["error"] for one in results if "error" in one]
    if errors or not results:
        return problem(f"{backend}: {errors[0] if errors else ended.why}", fix)
    if not all(one["right"] for one in results):
        return problem(f"{backend}: the sum was wrong", fix)
    first = results[0]
    return ok(
        f"{backend}: {first['size']} ranks compute the right sum, about {first['small_s'] * 1e6:.0f} us for 8 B and "
        f"{first['large_s'] * 1e3:.2g} ms for 1 MiB"
    )


_COUNT = 1000
_TIMEOUT_S = 30.0
_LARGE_BYTES = 1 << 20
_SMALL_CALLS = 20
_LARGE_CALLS = 5


def summed(comm: un.Communicator) -> dict[str, Any]:
    """Sum numbers over the ranks, check the sum, and time all_reduce.

    Returns:
        size: Number of ranks. right: Whether the sum is right. small_s, large_s: Median seconds for 8 bytes and for
        1 MiB.
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
    return statistics.median(timeit.repeat(lambda: comm.all_reduce(tensor, "max"), number=1, repeat=calls))


def main(argv: list[str] | None = None) -> int:
    """Test each backend, and print a JSON line with "backend" and the result of `summed`, or with an "error"."""
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
        # Report any error as the result of the test.
        except Exception as error:
            failed = True
            result = {"error": f"{type(error).__name__}: {error}"}
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
