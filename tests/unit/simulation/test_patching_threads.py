"""Threads, locks and queues of simulated ranks: they take turns too, and others see the real world."""

from __future__ import annotations

import concurrent.futures
import queue
import threading
import time
from typing import Any

import pytest
import torch
from simulated_programs import FREE, all_reduce

import unisono as un
from unisono.simulation import interposed


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
    got = [out.get(timeout=60.0) for _ in threads]
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


def test_threads_of_a_rank_alternate_in_virtual_time() -> None:
    started = time.monotonic()
    run = un.simulate(with_threads, 2, network=FREE)
    assert time.monotonic() - started < 60.0
    assert run.results == [[[2, 1, 0], [0, 1, 2], [0, 1, 2], 210]] * 2
    assert un.simulate(with_threads, 2, network=FREE).trace == run.trace


def test_thread_events_are_traced_reproducibly() -> None:
    def program(comm: un.Communicator) -> None:
        part = comm.dup()
        part.allow_any_thread()
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


def test_pools_of_the_library_keep_no_thread_between_programs() -> None:
    def program(comm: un.Communicator) -> float:
        tensor = torch.full((1,), float(comm.rank))
        work = comm.isend(tensor, 1) if comm.rank == 0 else comm.irecv(tensor)
        work.get_future().wait()
        return tensor.item()

    # The threads of the first program are idle for a while, and could take tasks of the others.
    for backend in ("thread", "sim", "sim"):
        assert un.launch(program, 2, backend) == [0.0, 0.0]


def test_other_threads_are_not_patched() -> None:
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


def test_patches_are_removed() -> None:
    names = [(time, "sleep"), (time, "monotonic"), (threading, "Lock"), (threading, "RLock"), (queue, "SimpleQueue")]
    names += [(threading.Thread, "start"), (threading.Thread, "join"), (torch.futures.Future, "wait")]
    before = [getattr(*name) for name in names]
    with interposed, interposed:
        assert all(getattr(*name) is not was for name, was in zip(names, before, strict=True))
    assert [getattr(*name) for name in names] == before


def test_simulations_may_run_concurrently_and_nested() -> None:
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
