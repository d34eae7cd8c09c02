"""Ranks that leave after their last call, while others still receive what they have sent."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
import torch

import unisono as un
from unisono.testing import run_ranks

TIMEOUT_S = 20.0
CALLS = ["all_to_all_single", "gather_v", "isend"]


@pytest.mark.parametrize("call", CALLS)
def test_receivers_of_a_rank_that_has_left_get_data_or_an_error(call: str) -> None:
    assert slowest(call, 2) < TIMEOUT_S / 4


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("call", CALLS)
def test_receivers_never_wait_for_the_timeout(call: str) -> None:
    assert slowest(call, 700) < TIMEOUT_S / 4


def slowest(call: str, rounds: int) -> float:
    """Return the longest time in seconds that a rank took to get data or an error."""
    longest = 0.0
    for _ in range(rounds):
        results = run_ranks(leave, 3, "gloo", call, timeout=TIMEOUT_S, on_failure="continue")
        assert results[0] == "left" or isinstance(results[0], float)
        assert isinstance(results[1], float), results[1]
        assert isinstance(results[2], float) or str(results[2]).endswith("rank 2 fails"), results[2]
        longest = max(longest, *(result for result in results if isinstance(result, float)))
    return longest


def leave(comm: un.Communicator, call: str) -> str | float:
    """Make the call; rank 0 leaves then, rank 2 fails, and rank 1 learns of either."""
    started = time.monotonic()
    # Each rank may be told that another has failed: what counts is when.
    with suppress(un.errors.CommError):
        send(comm, call)
        if comm.rank == 0:
            return "left"
        if comm.rank == 2:
            raise RuntimeError("rank 2 fails")
        comm.barrier()
    return time.monotonic() - started


def send(comm: un.Communicator, call: str) -> None:
    if call == "all_to_all_single":
        comm.all_to_all_single(torch.zeros(120_000), torch.ones(120_000))
    elif call == "gather_v":
        comm.gather_v(torch.ones(40_000 * (comm.rank + 1)), 2)
    elif comm.rank == 2:
        for source in (0, 1):
            comm.recv(torch.zeros(120_000), source)
    else:
        comm.isend(torch.ones(120_000), 2).wait()
