"""Simulated ranks: a seed decides everything, time is virtual, and nobody waits in vain."""

from __future__ import annotations

import concurrent.futures
import queue
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import unisono as un
from unisono.errors import CommTimeoutError, DeadlockError, PeerLostError
from unisono.testing import Faulty, KilledError
from unisono.transports.sim import Link, Network
from unisono.types import Recv, Send
from unisono.virtual import Scheduler, interposed
from unisono.work import wait_any

FREE = Network(Link(0.0, 0.0), request_s=0.0)


def all_reduce(comm: un.Communicator) -> float:
    t = torch.full((4,), float(comm.rank))
    comm.all_reduce(t)
    return t.sum().item()


def first_come(comm: un.Communicator) -> int:
    """Who comes first is up to the seed."""
    if comm.rank:
        comm.send(torch.ones(1), 0)
        return -1
    works = [comm.irecv(torch.zeros(1), rank) for rank in range(1, comm.size)]
    first = 1 + wait_any(works)
    for work in works:
        work.wait()
    return first


# -- the seed --------------------------------------------------------------------------------------
def test_the_same_seed_is_the_same_run() -> None:
    runs = [un.simulate(all_reduce, 3, seed=7) for _ in range(2)]
    assert runs[0].results == [12.0] * 3
    assert runs[0].trace == runs[1].trace
    assert runs[0].digest == runs[1].digest
    assert len(runs[0].trace) > 20


def test_other_seeds_are_other_runs() -> None:
    assert len({un.simulate(all_reduce, 3, seed=seed).digest for seed in range(10)}) > 5


def test_seeds_try_all_orders_each_always_the_same() -> None:
    firsts = {seed: un.simulate(first_come, 3, seed=seed).results[0] for seed in range(12)}
    assert set(firsts.values()) == {1, 2}
    for seed in range(3):
        assert un.simulate(first_come, 3, seed=seed).results[0] == firsts[seed]


def test_the_seed_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_SEED", "7")
    assert un.simulate(all_reduce, 3).digest == un.simulate(all_reduce, 3, seed=7).digest
    assert un.launch(all_reduce, 3, "sim") == [12.0] * 3
    monkeypatch.setenv("UNISONO_SEED", "seven")
    with pytest.raises(ValueError, match="a seed is a whole number, not 'seven'; look at UNISONO_SEED"):
        un.simulate(all_reduce, 3)


def test_launch_takes_a_seed_too() -> None:
    with pytest.raises(DeadlockError, match="seed 7"):
        un.launch(lambda comm: comm.recv(torch.ones(1), 1 - comm.rank), 2, "sim", seed=7)
    with pytest.raises(ValueError, match="only simulated ranks have a seed: use backend 'sim', not 'thread'"):
        un.launch(all_reduce, 2, "thread", seed=7)


@pytest.mark.parametrize("error", [KeyError("mine"), PeerLostError("mine")])
def test_a_failure_tells_its_seed(error: Exception) -> None:
    def program(comm: un.Communicator) -> None:
        if comm.rank == 1:
            raise error
        comm.barrier()

    with pytest.raises(type(error), match="mine") as caught:
        un.simulate(program, 2, seed=11)
    assert any("seed=11" in note and "UNISONO_SEED=11" in note for note in caught.value.__notes__)
    ends = un.simulate(program, 2, seed=11, on_failure="continue").results
    assert "seed 11" in str(ends[0])


def test_random_generators_are_of_each_rank() -> None:
    def program(comm: un.Communicator) -> list[float]:
        drawn = []
        for _ in range(3):
            drawn += [torch.rand(()).item(), random.random(), np.random.rand()]
            comm.barrier()
        return drawn

    # Numpy's state is a tuple here.
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
def test_messages_take_as_long_as_the_network_says(link: Link, count: int, messages: int, expected_s: float) -> None:
    network = Network(Link(0.0, 0.0), {(0, 1): link}, request_s=0.0)
    run = un.simulate(pass_on, 2, (count, messages), network=network)
    for found in run.results:
        assert found == pytest.approx(expected_s, rel=1e-3)


def test_only_the_slow_link_is_slow() -> None:
    network = Network(links={(1, 0): Link(latency_s=1.0)}, request_s=0.0)
    assert max(un.simulate(pass_on, 2, (8, 1), network=network, check="off").results) < 1e-3 + 1.0
    there = un.simulate(lambda comm: pass_on(comm, 8, 1), 2, network=Network(request_s=0.0)).results
    assert max(there) < 1e-3


def test_jitter_makes_latencies_differ() -> None:
    network = Network(Link(1e-3, 0.0), jitter=1.0, request_s=0.0)
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


def test_a_loop_that_only_looks_gets_on() -> None:
    def program(comm: un.Communicator) -> float:
        deadline = time.monotonic() + 0.001
        while time.monotonic() < deadline:
            pass
        work = comm.isend(torch.ones(1), 1) if comm.rank == 0 else comm.irecv(torch.ones(1), 0)
        while not work.is_completed():
            pass
        return 1.0

    assert un.simulate(program, 2).results == [1.0, 1.0]


def test_a_wait_ends_at_its_time_on_the_virtual_clock() -> None:
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


# -- deadlock --------------------------------------------------------------------------------------
def test_a_deadlock_names_everybody_at_once() -> None:
    def program(comm: un.Communicator) -> None:
        if comm.rank == 2:
            comm.all_reduce(torch.ones(1))
        else:
            comm.recv(torch.zeros(1), 1 - comm.rank)

    run = un.simulate(program, 3, on_failure="continue", seed=5)
    assert run.time_s < 1.0
    for rank, error in enumerate(run.results):
        assert isinstance(error, DeadlockError), error
        assert error.rank == rank
        said = str(error)
        assert "rank 0 waits in recv at test_simulate.py:" in said
        assert "for 4 B from rank 1" in said
        assert "rank 1 waits in recv at test_simulate.py:" in said
        assert "for 4 B from rank 0" in said
        assert "rank 2 waits in all_reduce at test_simulate.py:" in said
        assert "for ranks 0, 1 to come to" in said
        assert "seed 5" in said


def test_a_lock_that_nobody_opens_is_a_deadlock() -> None:
    def program(comm: un.Communicator) -> None:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

    with pytest.raises(DeadlockError, match=r"rank 0 waits at test_simulate.py:.* for something in its own process"):
        un.simulate(program, 1)


def test_after_a_deadlock_the_program_may_go_on() -> None:
    def program(comm: un.Communicator) -> str:
        part = comm.dup()
        try:
            part.recv(torch.zeros(1), 1 - comm.rank)
        except DeadlockError:
            comm.barrier()
        return "went on"

    assert un.simulate(program, 2).results == ["went on"] * 2


# -- threads, locks and queues ---------------------------------------------------------------------
def with_threads(comm: un.Communicator) -> list[Any]:
    out: queue.Queue[int] = queue.Queue(maxsize=1)
    simple: queue.SimpleQueue[int] = queue.SimpleQueue()
    condition, started = threading.Condition(), threading.Event()
    order: list[int] = []

    def work(number: int) -> None:
        started.wait()
        time.sleep(10.0 - number)
        with condition:
            order.append(number)
            condition.notify_all()
        out.put(number)
        simple.put(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    started.set()
    with condition:
        assert condition.wait_for(lambda: len(order) == 3, timeout=100.0)
    got = [out.get(timeout=5.0) for _ in threads]
    threads[0].join()
    assert not threads[0].is_alive()
    with pytest.raises(queue.Empty):
        out.get(timeout=50.0)
    with pytest.raises(queue.Empty):
        queue.SimpleQueue().get(timeout=50.0)
    assert not threading.Event().wait(100.0)
    lock = threading.RLock()
    with lock, lock:
        assert not threading.Lock().locked()
    return [order, sorted(got), sorted(simple.get() for _ in threads), round(time.monotonic())]


def test_threads_of_a_rank_take_turns_in_virtual_time() -> None:
    started = time.monotonic()
    run = un.simulate(with_threads, 2, network=FREE)
    assert time.monotonic() - started < 60.0
    assert run.results == [[[2, 1, 0], [0, 1, 2], [0, 1, 2], 210]] * 2
    assert un.simulate(with_threads, 2, network=FREE).trace == run.trace


def test_what_threads_do_is_in_the_trace_and_the_same_every_time() -> None:
    def program(comm: un.Communicator) -> None:
        part = comm.dup()
        part.share()
        works = [lambda: part.send(torch.ones(1), 1), lambda: part.recv(torch.ones(1), 0)]
        threads = [threading.Thread(target=works[comm.rank]) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    runs = [un.simulate(program, 2, seed=4) for _ in range(2)]
    assert runs[0].trace == runs[1].trace
    assert any(" rank 0.3: world/1.0: 4 B to rank 1" in line for line in runs[0].trace)


def test_thread_pools_and_futures_work() -> None:
    def program(comm: un.Communicator) -> list[int]:
        with concurrent.futures.ThreadPoolExecutor(3) as crew:
            found = list(crew.map(lambda n: time.sleep(n) or n, range(4)))
        future: torch.futures.Future[int] = torch.futures.Future()
        threading.Thread(target=lambda: (time.sleep(5.0), future.set_result(7))).start()
        return [*found, future.wait()]

    assert un.simulate(program, 2).results == [[0, 1, 2, 3, 7]] * 2


def test_other_threads_see_the_real_world() -> None:
    seen: list[Any] = []
    go, done = threading.Event(), threading.Event()

    def bystander() -> None:
        go.wait(30.0)
        started = time.monotonic()
        time.sleep(0.01)
        seen.extend([time.monotonic() - started, type(threading.Lock()), time.time()])
        done.set()

    thread = threading.Thread(target=bystander)
    thread.start()
    real = type(threading.Lock())

    def program(comm: un.Communicator) -> type:
        if comm.rank == 0:
            go.set()
            while not seen:
                time.sleep(1.0)
        return type(threading.Lock())

    found = un.simulate(program, 2).results
    thread.join()
    assert 0.01 <= seen[0] < 30.0
    assert seen[1] is real
    assert abs(seen[2] - time.time()) < 60.0
    assert found[0] is found[1] is not real


def test_all_is_taken_back() -> None:
    names = [(time, "sleep"), (time, "monotonic"), (threading, "Lock"), (threading, "RLock"), (queue, "SimpleQueue")]
    names += [(threading.Thread, "start"), (threading.Thread, "join"), (torch.futures.Future, "wait")]
    before = [getattr(*name) for name in names]
    with interposed(), interposed():
        assert all(getattr(*name) is not was for name, was in zip(names, before, strict=True))
    assert [getattr(*name) for name in names] == before


def test_simulations_may_run_beside_and_within_each_other() -> None:
    alone = un.simulate(all_reduce, 3, seed=7)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(un.simulate(all_reduce, 3, seed=7))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    def outer(comm: un.Communicator) -> str:
        comm.barrier()
        return un.simulate(all_reduce, 3, seed=7).digest

    found += [un.simulate(all_reduce, 3, seed=7)]
    assert {run.digest for run in found} == {alone.digest}
    assert un.simulate(outer, 2).results == [alone.digest] * 2


# -- ends ------------------------------------------------------------------------------------------
def lose_threads(comm: un.Communicator) -> None:
    threading.Thread(target=threading.Event().wait).start()
    threading.Thread(target=lambda: queue.SimpleQueue().get(), daemon=True).start()
    if comm.rank == 1:
        raise KeyError("mine")


@pytest.mark.parametrize("backend", ["sim", "thread"])
def test_no_thread_is_left(backend: str) -> None:
    before = set(threading.enumerate())
    with pytest.raises(KeyError, match="mine"):
        un.simulate(lose_threads, 3, backend=backend)
    assert set(threading.enumerate()) <= before


def test_who_goes_on_after_a_failure_is_ended_after_a_while() -> None:
    def program(comm: un.Communicator) -> None:
        if comm.rank == 1:
            raise KeyError("mine")
        time.sleep(1e6)

    with pytest.raises(KeyError, match="mine"):
        un.simulate(program, 2)
    run = un.simulate(program, 2, on_failure="continue")
    assert run.results[0] is None
    assert run.time_s > 1e6


def test_a_killed_rank_tells_nobody_and_is_named() -> None:
    reached: list[str] = []

    def program(comm: un.Communicator) -> None:
        try:
            for _ in range(5):
                comm.all_reduce(torch.ones(1))
        except KilledError:
            with pytest.raises(un.CommError):
                comm.send(torch.ones(1), 0)
            reached.append("nothing")
            raise

    run = un.simulate(program, 3, on_failure="continue", faults={"kill_at": 3, "ranks": [1]})
    assert isinstance(run.results[1], KilledError)
    for error in (run.results[0], run.results[2]):
        assert isinstance(error, PeerLostError)
        assert error.peer == 1
        assert "its process ended without closing" in str(error)
    assert reached == ["nothing"]


def test_a_frozen_rank_is_named() -> None:
    faults = {"freeze_at": 2, "ranks": [1]}

    def program(comm: un.Communicator) -> None:
        for _ in range(3):
            comm.all_reduce(torch.ones(1))

    run = un.simulate(program, 3, on_failure="continue", faults=faults)
    assert run.time_s < 10.0
    for error in run.results:
        assert isinstance(error, DeadlockError)
        assert "rank 1 waits in all_reduce at test_simulate.py" in str(error)
        assert "it is frozen, as asked" in str(error)


def test_what_blocks_for_real_is_found_out() -> None:
    blocked, free = threading.Event(), threading.Event()
    scheduler = Scheduler(0, 10.0, stuck_s=0.1)

    def wait_for_real() -> None:
        # Made outside, so it is none of the simulation's.
        blocked.set()
        free.wait()

    timer = threading.Timer(0.5, free.set)
    timer.start()
    scheduler.start(wait_for_real, "task", 0, main=True)
    with pytest.raises(CommTimeoutError, match=r"task has let nobody else run for 0 s(.|\n)*wait_for_real"):
        scheduler.run()
    assert blocked.is_set()
    timer.join()


# -- the transport ---------------------------------------------------------------------------------
def test_a_buffer_that_is_changed_too_early_is_seen() -> None:
    def program(comm: un.Communicator) -> float:
        t = torch.ones(1)
        if comm.rank == 0:
            work = comm.isend(t, 1)
            time.sleep(1e-6)
            t.fill_(2.0)
            work.wait()
        else:
            comm.recv(t, 0)
        return t.item()

    network = Network(Link(1.0, 0.0), request_s=0.0)
    assert un.simulate(program, 2, network=network).results[1] == 2.0


def test_an_abort_while_a_message_is_on_its_way() -> None:
    def program(comm: un.Communicator) -> tuple[bool, float]:
        part, t = comm.dup(), torch.full((1,), float(comm.rank))
        work = part.isend(t, 1) if comm.rank == 0 else part.irecv(t, 0)
        if comm.rank == 0:
            # Both ends are there, and the message is on its way.
            time.sleep(0.5)
            part.abort("enough")
        with pytest.raises(un.CommError, match="enough"):
            work.wait()
        t.fill_(7.0)
        time.sleep(10.0)
        return work.is_completed(), t.item()

    network = Network(links={(0, 1): Link(1.0, 0.0)})
    assert un.simulate(program, 2, network=network).results == [(True, 7.0)] * 2


def test_the_bits_are_those_of_threads() -> None:
    def program(comm: un.Communicator) -> torch.Tensor:
        t = torch.randn(1000, generator=torch.Generator().manual_seed(comm.rank))
        comm.all_reduce(t, algorithm="ring")
        return t

    found = [un.launch(program, 3, backend) for backend in ("thread", "sim")]
    assert all(torch.equal(t, found[0][0]) for results in found for t in results)


def test_threads_as_transport_can_be_simulated_too() -> None:
    runs = [un.simulate(all_reduce, 3, seed=3, backend="thread") for _ in range(2)]
    assert runs[0].results == [12.0] * 3
    assert runs[0].trace == runs[1].trace


def test_batches_of_messages_work() -> None:
    def program(comm: un.Communicator) -> list[float]:
        got, right, left = torch.zeros(2), (comm.rank + 1) % 3, (comm.rank - 1) % 3
        sent = torch.full((2,), float(comm.rank))
        batch = [Recv(got, left), Send(sent, right)]
        for work in comm.batch_isend_irecv(batch):
            work.wait()
        return got.tolist()

    assert un.simulate(program, 3).results == [[2.0, 2.0], [0.0, 0.0], [1.0, 1.0]]


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("backend", ["sim", "thread"])
def test_groups_that_are_closed_leave_nothing(backend: str, count: int) -> None:
    before = set(threading.enumerate())

    def program(comm: un.Communicator) -> list[int]:
        for _ in range(count):
            with comm.dup() as part:
                part.barrier()
        comm.barrier()
        mail = comm._plain()._mail  # type: ignore[attr-defined]  # not in the annotations of what it is
        return [len(mail.left), len(mail.broken), len(mail.waiting)]

    for left, broken, waiting in un.simulate(program, 3, backend=backend).results:
        # The last one may not be over yet, and nor is the barrier.
        assert left <= 3
        assert broken == 0
        assert waiting <= 6
    assert set(threading.enumerate()) <= before


# -- bad input -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nprocs": 0}, "nprocs must be a positive int, not 0"),
        ({"timeout": 0}, "timeout must be a positive number"),
        ({"backend": "gloo"}, "ranks of backend 'gloo' are processes, which cannot be simulated; use 'sim'"),
        ({"backend": "sum"}, "unknown transport 'sum'"),
        ({"faults": {"drop": 2.0}}, "drop is a chance from 0 to 1, not 2.0"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        un.simulate(all_reduce, **options)


def test_bad_networks_are_refused() -> None:
    with pytest.raises(ValueError, match="latency_s and second_per_byte must not be negative"):
        Link(-1.0)
    with pytest.raises(ValueError, match="jitter must not be negative"):
        Network(jitter=-1.0)


def test_faults_of_a_wrapper_go_on_in_parts() -> None:
    def program(comm: un.Communicator) -> None:
        part = comm.dup()
        part.send(torch.ones(1), 1) if comm.rank == 0 else part.recv(torch.ones(1), 0)

    # The sender believes that it was received, and leaves.
    with pytest.raises(PeerLostError, match="rank 0 has left"):
        un.simulate(program, 2, wrap=lambda inner: Faulty(inner, seed=0, drop=1.0))
