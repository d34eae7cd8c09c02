"""Simulations of many ranks: an event costs the same however many ranks there are."""

from __future__ import annotations

import threading

import pytest
import torch
from simulated_programs import all_reduce

import unisono as un
from unisono.errors import DeadlockError
from unisono.testing import KilledError, RankFaults


def calls_per_rank(ranks: int) -> float:
    """Count the calls of functions, in all threads of a simulated all_reduce."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    threading.setprofile(count)
    try:
        un.simulate(all_reduce, ranks)
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]  # as documented
    return calls / ranks


def test_event_cost_is_independent_of_the_number_of_ranks() -> None:
    # The first run also imports, and fills tables for later ones.
    _, few, more, many = (calls_per_rank(ranks) for ranks in (16, 16, 32, 64))
    # A doubling of the ranks is one more round. A scan of all ranks by each of them would make the second step longer.
    assert many - more < 1.1 * (more - few)


def test_all_reduce_of_many_ranks_sends_few_messages() -> None:
    trace = un.simulate(all_reduce, 32).trace
    assert sum("reach rank" in line for line in trace) == 32 * 5


@pytest.mark.parametrize("ranks", [32, pytest.param(500, marks=pytest.mark.soak)])
def test_deadlock_report_of_many_ranks_is_short(ranks: int) -> None:
    def one_skips(comm: un.Communicator) -> None:
        comm.recv(torch.zeros(1), 0) if comm.rank == ranks - 1 else comm.barrier()

    def ring(comm: un.Communicator) -> None:
        comm.recv(torch.zeros(1), (comm.rank - 1) % ranks)

    for error in un.simulate(one_skips, ranks, on_failure="continue").results:
        assert isinstance(error, DeadlockError)
        assert f"ranks 0, 1, 2, 3, 4, 5, 6, 7 and {ranks - 9} more wait in barrier at" in str(error)
        assert f"for rank {ranks - 1} to join" in str(error)
        assert f"rank {ranks - 1} waits in recv at" in str(error)
        assert len(str(error)) < 500
    for error in un.simulate(ring, ranks, on_failure="continue").results:
        assert "rank 1 waits in recv at test_scheduler_scale.py:" in str(error)
        assert f"and {ranks - 16} ranks more wait" in str(error)
        assert len(str(error)) < 2000


@pytest.mark.parametrize("ranks", [32, pytest.param(500, marks=pytest.mark.soak)])
def test_death_among_many_ranks_is_named(ranks: int) -> None:
    def program(comm: un.Communicator) -> None:
        for _ in range(2):
            comm.all_reduce(torch.ones(1))

    run = un.simulate(
        program, ranks, on_failure="continue", faults={"on_ranks": RankFaults(kill_at=5, ranks=[ranks // 2])}
    )
    for rank, error in enumerate(run.results):
        if rank == ranks // 2:
            assert isinstance(error, KilledError)
        else:
            assert f"rank {ranks // 2} was lost" in str(error)


@pytest.mark.soak
def test_thousands_of_ranks_sum() -> None:
    assert un.simulate(all_reduce, 4096).results == [4 * 4095 * 2048.0] * 4096
