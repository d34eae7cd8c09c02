"""Simulated ranks: a seed decides everything, and time is virtual."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from simulated_programs import FREE, all_reduce

import unisono as un
from unisono.core.work import wait_any
from unisono.errors import CommTimeoutError, DeadlockError, PeerLostError
from unisono.testing import Faulty, RankFaults
from unisono.transports.sim import Link, SimNetwork


def first_come(comm: un.Communicator) -> int:
    """The seed decides which rank is first."""
    if comm.rank:
        comm.send(torch.ones(1), 0)
        return -1
    works = [comm.irecv(torch.zeros(1), rank) for rank in range(1, comm.size)]
    first = 1 + wait_any(works)
    for work in works:
        work.wait()
    return first


# -- the seed --------------------------------------------------------------------------------------
def test_equal_seeds_give_equal_runs() -> None:
    runs = [un.simulate(all_reduce, 3, seed=7) for _ in range(2)]
    assert runs[0].results == [12.0] * 3
    assert runs[0].trace == runs[1].trace
    assert runs[0].digest == runs[1].digest
    assert len(runs[0].trace) > 20


def test_different_seeds_give_different_runs() -> None:
    assert len({un.simulate(all_reduce, 3, seed=seed).digest for seed in range(10)}) > 5


def test_seeds_cover_all_orders_reproducibly() -> None:
    firsts = {seed: un.simulate(first_come, 3, seed=seed).results[0] for seed in range(12)}
    assert set(firsts.values()) == {1, 2}
    for seed in range(3):
        assert un.simulate(first_come, 3, seed=seed).results[0] == firsts[seed]


def test_seed_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_SEED", "7")
    assert un.simulate(all_reduce, 3).digest == un.simulate(all_reduce, 3, seed=7).digest
    assert un.launch(all_reduce, 3, "sim") == [12.0] * 3
    monkeypatch.setenv("UNISONO_SEED", "seven")
    with pytest.raises(ValueError, match="a seed must be a whole number, not 'seven'; check UNISONO_SEED"):
        un.simulate(all_reduce, 3)


def test_launch_accepts_a_seed() -> None:
    with pytest.raises(DeadlockError) as caught:
        un.launch(lambda comm: comm.recv(torch.ones(1), 1 - comm.rank), 2, "sim", seed=7)
    assert any(note.startswith("simulated with seed 7") for note in caught.value.__notes__)
    with pytest.raises(ValueError, match="only simulated ranks have a seed: use backend 'sim', not 'thread'"):
        un.launch(all_reduce, 2, "thread", seed=7)


@pytest.mark.parametrize("error", [KeyError("mine"), PeerLostError("mine")])
def test_failure_reports_its_seed(error: Exception) -> None:
    def program(comm: un.Communicator) -> None:
        if comm.rank == 1:
            raise error
        comm.barrier()

    with pytest.raises(type(error), match="mine") as caught:
        un.simulate(program, 2, seed=11)
    assert any("seed=11" in note and "UNISONO_SEED=11" in note for note in caught.value.__notes__)
    ends = un.simulate(program, 2, seed=11, on_failure="continue").results
    assert any("seed 11" in note for note in ends[0].__notes__)


def test_random_generators_are_per_rank() -> None:
    def program(comm: un.Communicator) -> list[float]:
        drawn = []
        for _ in range(3):
            drawn += [torch.rand(()).item(), random.random(), np.random.rand()]
            comm.barrier()
        return drawn

    # Numpy's state is a tuple here.
    # numpy declares a dict, which it returns for other generators.
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    runs = [un.simulate(program, 3, seed=seed).results for seed in (1, 1, 2)]
    # As in processes of their own: the same on all ranks, whatever their order.
    assert runs[0] == [runs[0][0]] * 3
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]  # type: ignore[union-attr]  # numpy's state is a tuple here


# -- time ------------------------------------------------------------------------------------------
def pass_on(comm: un.Communicator, count: int, messages: int) -> float:
    comm.barrier(algorithm="dissemination")
    start = time.monotonic()
    tensors = [torch.zeros(count, dtype=torch.uint8) for _ in range(messages)]
    works = [comm.isend(t, 1) if comm.rank == 0 else comm.irecv(t, 0) for t in tensors]
    for work in works:
        work.wait()
    return time.monotonic() - start


@pytest.mark.parametrize(
    ("link", "count", "messages", "expected_s"),
    [
        (Link(1e-3, 0.0), 1000, 1, 1e-3),
        (Link(0.0, 1e-6), 1000, 1, 1e-3),
        # Latencies overlap, bytes do not.
        (Link(1e-3, 1e-6), 1000, 4, 5e-3),
    ],
)
def test_message_times_follow_the_network(link: Link, count: int, messages: int, expected_s: float) -> None:
    network = SimNetwork(Link(0.0, 0.0), {(0, 1): link}, request_s=0.0)
    run = un.simulate(pass_on, 2, (count, messages), network=network)
    for found in run.results:
        assert found == pytest.approx(expected_s, rel=1e-3)


def test_slow_link_affects_only_itself() -> None:
    network = SimNetwork(links={(1, 0): Link(latency_s=1.0)}, request_s=0.0)
    assert max(un.simulate(pass_on, 2, (8, 1), network=network, check="off").results) < 1e-3 + 1.0
    there = un.simulate(lambda comm: pass_on(comm, 8, 1), 2, network=SimNetwork(request_s=0.0)).results
    assert max(there) < 1e-3


def test_jitter_makes_latencies_differ() -> None:
    network = SimNetwork(Link(1e-3, 0.0), jitter=1.0, request_s=0.0)
    found = [max(un.simulate(pass_on, 2, (8, 1), seed=seed, network=network).results) for seed in range(5)]
    assert all(1e-3 <= time_s <= 2.1e-3 for time_s in found)
    assert len(set(found)) == 5


def test_clocks_and_sleep_are_virtual() -> None:
    def program(comm: un.Communicator) -> list[float]:
        clocks: list[Callable[[], float]] = [time.monotonic, time.perf_counter, time.time]
        clocks += [lambda: time.monotonic_ns() / 1e9, lambda: time.time_ns() / 1e9]
        before = [clock() for clock in clocks]
        time.sleep(1000.0 * (1 + comm.rank))
        return [clock() - begun for clock, begun in zip(clocks, before, strict=True)]

    started = time.monotonic()
    run = un.simulate(program, 2, network=FREE)
    assert time.monotonic() - started < 60.0
    assert run.results[0] == pytest.approx([1000.0] * 5)
    assert run.results[1] == pytest.approx([2000.0] * 5)
    assert run.time_s == pytest.approx(2000.0, rel=0.01)


def test_polling_loop_makes_progress() -> None:
    def program(comm: un.Communicator) -> float:
        deadline = time.monotonic() + 0.001
        while time.monotonic() < deadline:
            pass
        work = comm.isend(torch.ones(1), 1) if comm.rank == 0 else comm.irecv(torch.ones(1), 0)
        while not work.is_completed():
            pass
        return 1.0

    assert un.simulate(program, 2).results == [1.0, 1.0]


def test_wait_times_out_on_the_virtual_clock() -> None:
    def program(comm: un.Communicator) -> tuple[float | None, float]:
        if comm.rank == 0:
            with pytest.raises(CommTimeoutError, match="rank 1") as caught:
                comm.irecv(torch.zeros(1), 1).wait(100.0)
            comm.send(torch.ones(1), 1)
            return caught.value.waited_s, time.monotonic()
        comm.recv(torch.zeros(1), 0)
        return 100.0, time.monotonic()

    started = time.monotonic()
    for waited, now in un.simulate(program, 2).results:
        assert waited == pytest.approx(100.0)
        assert now == pytest.approx(100.0, rel=0.01)
    assert time.monotonic() - started < 60.0


# -- bad input -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nprocs": 0}, "nprocs must be a positive int, not 0"),
        ({"timeout": 0}, "timeout must be a positive number"),
        ({"backend": "gloo"}, "ranks of backend 'gloo' are processes, which cannot be simulated; use 'sim'"),
        ({"backend": "sum"}, r"unknown transport 'sum'; known: .*; did you mean 'sim'\?"),
        ({"on_failure": "contine"}, "on_failure must be 'end' or 'continue', not 'contine'"),
        ({"chunk_bytes": 0}, "chunk_bytes must be a positive int, not 0"),
        ({"preempt": "often"}, "preempt must be a probability from 0 to 1, not 'often'"),
        ({"network": {"jitter": 1.0}}, "network must be a unisono.transports.sim.SimNetwork, not {'jitter': 1.0}"),
        ({"network": SimNetwork(links={(0, 2): Link()})}, "a link is between ranks 0 and 2, but the ranks are 0 to 1"),
        ({"network": FREE, "backend": "thread"}, "network= is for backend 'sim'"),
        ({"faults": {"drop": 2.0}}, "drop must be a probability from 0 to 1, not 2.0"),
        ({"faults": {"drop": "often"}}, "drop must be a number, not 'often'"),
        ({"faults": {"dorp": 0.1}}, r"unknown fault 'dorp'; known: .*; did you mean 'drop'\?"),
        ({"faults": {"seed": 1}}, "unknown fault 'seed'"),
        ({"faults": {"on_ranks": RankFaults(kill_at=1, ranks=[0, 2])}}, "faults name rank 2, but the ranks are 0 to 1"),
        ({"faults": {"on_ranks": [1]}}, r"on_ranks must be a unisono.testing.RankFaults, not \[1\]"),
    ],
)
def test_bad_arguments_are_rejected_before_ranks_start(options: dict[str, Any], words: str) -> None:
    # Errors of ranks would be among the results.
    with pytest.raises((ValueError, TypeError), match=words):
        un.simulate(all_reduce, **{"on_failure": "continue", **options})


def test_bad_networks_are_rejected() -> None:
    with pytest.raises(ValueError, match="latency_s and second_per_byte must not be negative"):
        Link(-1.0)
    with pytest.raises(ValueError, match="jitter must not be negative"):
        SimNetwork(jitter=-1.0)
    with pytest.raises(TypeError, match=r"links must be named by \(source, destination\), such as \(0, 1\), not 0"):
        SimNetwork(links={0: Link()})  # type: ignore[dict-item]  # a wrong type is the test
    with pytest.raises(TypeError, match=r"the link of \(0, 1\) must be a Link, not 3"):
        SimNetwork(links={(0, 1): 3})  # type: ignore[dict-item]  # a wrong type is the test


def test_wrapper_faults_apply_to_subgroups() -> None:
    def program(comm: un.Communicator) -> None:
        part = comm.dup()
        part.send(torch.ones(1), 1) if comm.rank == 0 else part.recv(torch.ones(1), 0)

    # The sender believes that it was received, and leaves.
    with pytest.raises(PeerLostError, match="rank 0 has left"):
        un.simulate(program, 2, wrap=lambda inner: Faulty(inner, seed=0, drop=1.0))
