"""Pools: the laws of `concurrent.futures` on threads, simulated ranks and processes."""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import subprocess
import sys
import threading
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from typing import Any

import pool_tasks as tasks
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import unisono as un
from unisono.pool.batch import TaskBatch

_numbers = itertools.count()


def end_of(future: Future[Any]) -> tuple[str, Any]:
    """Return how a future has ended, for comparison."""
    try:
        return "result", future.result(timeout=60)
    except CancelledError:
        return "cancelled", future.cancelled()
    except Exception as error:
        known = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
        return known.__name__, error.args


calls = st.one_of(
    st.tuples(st.just(tasks.square), st.tuples(st.integers(-9, 9)), st.just({})),
    st.tuples(
        st.just(tasks.divide),
        st.tuples(st.integers(-9, 9), st.integers(-1, 1)),
        st.one_of(st.just({}), st.just({"plus": 3}), st.just({"minus": 3})),
    ),
    st.tuples(st.just(tasks.square), st.just(("text",)), st.just({})),
)


def submit_and_cancel(pool: Executor, wanted: list[Any], cancelled: set[int], end_early: bool) -> list[Any]:
    """Submit calls behind one that holds the only worker, cancel some, and return how all have ended."""
    number = next(_numbers)
    tasks.GATES[number] = threading.Event()
    held = pool.submit(tasks.hold, number)
    while not held.running():
        pass
    futures = [pool.submit(fn, *args, **kwargs) for fn, args, kwargs in wanted]
    said = [held.cancel(), *(future.cancel() for index, future in enumerate(futures) if index in cancelled)]
    pool.shutdown(wait=False, cancel_futures=end_early)
    tasks.GATES[number].set()
    pool.shutdown()
    assert all(future.done() for future in futures)
    with pytest.raises(RuntimeError, match=r"shut ?down"):
        pool.submit(tasks.square, 1)
    return [said, end_of(held), *map(end_of, futures)]


@given(st.lists(calls, max_size=6), st.sets(st.integers(0, 5)), st.booleans())
def test_submits_end_as_those_of_threads(wanted: list[Any], cancelled: set[int], end_early: bool) -> None:
    own, others = un.Pool(1, backend="thread"), ThreadPoolExecutor(1)
    expected = submit_and_cancel(others, wanted, cancelled, end_early)
    assert submit_and_cancel(own, wanted, cancelled, end_early) == expected


def taken(results: Any) -> list[Any]:
    """Return what an iterator yields, and its error at the end."""
    found = []
    try:
        for result in results:
            found.append(result)  # noqa: PERF402  # those before an error count
    except Exception as error:
        found.append(type(error).__mro__[-4:-2])
    return found


@given(
    st.lists(st.integers(-3, 9), max_size=30),
    st.lists(st.integers(0, 9), max_size=30),
    st.sampled_from([None, 1, 2, 7]),
    st.integers(1, 3),
)
def test_map_yields_what_that_of_threads_does(xs: list[int], ys: list[int], chunksize: int | None, size: int) -> None:
    with ThreadPoolExecutor(2) as others, un.Pool(size, backend="thread") as own:
        expected = taken(others.map(tasks.divide, xs, ys))
        assert taken(own.map(tasks.divide, xs, ys, chunksize=chunksize)) == expected
        assert taken(own.starmap(tasks.divide, list(zip(xs, ys, strict=False)), chunksize=chunksize)) == expected
        if all(ys[: len(xs)]):
            assert sorted(own.map(tasks.divide, xs, ys, chunksize=chunksize, unordered=True)) == sorted(expected)


def collective(comm: un.Communicator, trusted: bool) -> Any:
    ends: Any = None
    with un.Pool(comm, trusted=trusted) as pool:
        if comm.rank == 0:
            ends = [list(pool.map(tasks.square, range(50))), pool.submit(tasks.flip, tasks.Point(1, 2)).result()]
            ends.append(pool.submit(tasks.square, torch.full((5000,), 3.0)).result().sum().item())
            try:
                ends.append(pool.submit(tasks.same_class, 1).result())
            except un.rpc.NotExposedError as error:
                ends.append("is not exposed" in str(error))
            try:
                ends.append(pool.submit(lambda: 7).result())
            except (TypeError, un.rpc.NotExposedError) as error:
                ends.append(type(error).__name__)
        else:
            assert pool is None
    return ends


@pytest.mark.parametrize("backend", ["thread", "sim"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("trusted", [False, True])
def test_ranks_of_a_communicator_serve_rank_0(backend: str, size: int, trusted: bool) -> None:
    first, *others = un.launch(collective, size, backend, (trusted,))
    last = [(False, 1), 7] if trusted else [True, "NotExposedError"]
    assert first == [[x * x for x in range(50)], tasks.Point(2, 1), 45000.0, *last]
    assert others == [None] * (size - 1)


def served_without_with(comm: un.Communicator) -> Any:
    pool = un.Pool(comm, trusted=True)
    if comm.rank:
        with pytest.raises(RuntimeError, match="only rank 0 submits"):
            pool.submit(tasks.square, 1)
    result = None if comm.rank else pool.submit(tasks.square, 3).result()
    pool.shutdown()
    pool.shutdown()
    return result


def test_shutdown_serves_on_other_ranks() -> None:
    assert un.launch(served_without_with, 3, "thread") == [9, None, None]


def left_behind(comm: un.Communicator) -> None:
    pool = un.Pool(comm)
    if comm.rank == 0:
        raise KeyError("rank 0 has failed")
    pool.shutdown()


def test_workers_end_with_rank_0() -> None:
    first, *others = un.launch(left_behind, 3, "thread", on_failure="continue")
    assert isinstance(first, KeyError)
    assert all(isinstance(end, un.errors.PeerLostError) and end.peer == 0 for end in others)


def of_two_minds(comm: un.Communicator) -> None:
    with un.Pool(comm, trusted=comm.rank == 0) as pool:
        if pool is not None:
            with pytest.raises(un.pool.BrokenPoolError, match="different values of trusted"):
                pool.submit(tasks.square, 1).result()


def test_ranks_agree_on_trust() -> None:
    assert un.launch(of_two_minds, 2, "thread") == [None, None]


def under_deaths(comm: un.Communicator, deadly: set[int], chunksize: int | None) -> Any:
    ended: list[int] = []
    # Calls that shared a chunk with a deadly one may have lost two workers.
    with un.Pool(comm, trusted=True, retries=2) as pool:
        if comm.rank:
            return None
        futures = [pool.submit(tasks.die_once, index, deadly) for index in range(100, 110)]
        for future in futures:
            future.add_done_callback(lambda done: ended.append(done.result()))
        mapped = list(pool.starmap(tasks.die_once, [(index, deadly) for index in range(40)], chunksize=chunksize))
        return mapped, [future.result() for future in futures], sorted(ended)


@given(st.sets(st.one_of(st.integers(0, 39), st.integers(100, 109)), max_size=2), st.sampled_from([None, 1, 8]),
       st.integers(0, 1000))  # fmt: skip
def test_tasks_of_dead_workers_run_again_with_one_result(deadly: set[int], chunksize: int | None, seed: int) -> None:
    tasks.RUNS.clear()
    ran = un.simulate(under_deaths, 4, (deadly, chunksize), seed=seed, on_failure="continue")
    single = [index * index for index in range(100, 110)]
    assert ran.results[0] == ([index * index for index in range(40)], single, single)
    assert sum(isinstance(end, tasks.DeathError) for end in ran.results) == len(deadly)
    assert all(tasks.RUNS[index] == 2 for index in deadly)
    assert max(tasks.RUNS.values()) <= 2 + len(deadly)


def poisoned(comm: un.Communicator) -> Any:
    with un.Pool(comm, trusted=True, retries=0) as pool:
        if comm.rank:
            return None
        with pytest.raises(un.errors.PeerLostError, match=r"call 0 of submit\(die_once\) does not run again") as caught:
            pool.submit(tasks.die_once, 5, {5}).result()
        assert not isinstance(caught.value, un.pool.BrokenPoolError)
        tasks.RUNS.clear()
        with pytest.raises(un.errors.PeerLostError, match=r"one of the calls 4 to 7 of map\(die_once\)"):
            list(pool.starmap(tasks.die_once, [(index, {5}) for index in range(8)], chunksize=4))
        return pool.submit(tasks.square, 3).result()


def test_a_task_that_ends_its_workers_fails_by_name_and_spares_the_others() -> None:
    tasks.RUNS.clear()
    assert un.launch(poisoned, 4, "thread", on_failure="continue")[0] == 9


def all_dead(comm: un.Communicator) -> Any:
    with un.Pool(comm, trusted=True) as pool:
        if comm.rank:
            return None
        futures = [pool.submit(tasks.die_once, index, {0}) for index in range(3)]
        for future in futures:
            with pytest.raises(un.pool.BrokenPoolError, match="no worker left"):
                future.result()
        with pytest.raises(un.pool.BrokenPoolError, match="no worker left"):
            pool.submit(tasks.square, 1)
        return "broken"


def test_a_pool_without_workers_is_broken() -> None:
    tasks.RUNS.clear()
    assert un.launch(all_dead, 2, "thread", on_failure="continue")[0] == "broken"


def test_initializer_runs_first_in_the_thread_of_the_tasks() -> None:
    with un.Pool(1, backend="thread", initializer=tasks.set_offset, initargs=(5,)) as pool:
        assert list(pool.map(tasks.read_offset, range(3))) == [5, 6, 7]
        assert len(set(pool.map(tasks.thread_of, range(20), chunksize=1))) == 1
    with un.Pool(2, backend="thread", initializer=tasks.fail_to_begin) as pool:
        with pytest.raises(un.pool.BrokenPoolError, match="no licence") as caught:
            pool.submit(tasks.square, 1).result()
        assert isinstance(caught.value.__cause__, LookupError)


def test_contents_that_cannot_be_sent_are_one_error() -> None:
    with un.Pool(1, backend="thread") as pool:
        with pytest.raises(TypeError, match=r"arguments cannot be pickled: cannot pickle '_thread\.lock'"):
            pool.submit(tasks.square, threading.Lock())
        with pytest.raises(TypeError, match="a task's result, lock, cannot be sent back"):
            pool.submit(tasks.unsendable).result()
        assert taken(pool.map(tasks.square, [3, *[threading.Lock()] * 1200], chunksize=1)) == [
            9,
            (TypeError, Exception),
        ]
        assert pool.submit(tasks.square, 2).result() == 4


def test_functions_of_the_interpreter_go_by_name() -> None:
    with un.Pool(1, backend="thread") as pool:
        assert list(pool.map(int, ["1", "2"])) == [1, 2]
        assert pool.submit(dict, fn=1).result() == {"fn": 1}
        assert pool.submit(os.path.basename, "a/b").result() == "b"


def test_arguments_are_copied_by_submit() -> None:
    with un.Pool(1, backend="thread") as pool:
        values = torch.zeros(3)
        futures = []
        for number in range(20):
            values.fill_(number)
            futures.append(pool.submit(tasks.square, values))
        assert [future.result()[0].item() for future in futures] == [number * number for number in range(20)]


def test_map_ends_at_its_timeout() -> None:
    number = next(_numbers)
    tasks.GATES[number] = threading.Event()
    with un.Pool(1, backend="thread") as pool:
        results = pool.map(tasks.hold, [number], timeout=0.05)
        with pytest.raises(TimeoutError, match="0 of 1 results"):
            next(results)
        tasks.GATES[number].set()


def test_asyncio_awaits_tasks() -> None:
    async def program() -> list[int]:
        loop = asyncio.get_running_loop()
        return await asyncio.gather(*(loop.run_in_executor(pool, tasks.square, x) for x in range(9)))

    with un.Pool(2, backend="thread") as pool:
        assert asyncio.run(program()) == [x * x for x in range(9)]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
def test_errors_of_every_kind_are_results(kind: type[BaseException]) -> None:
    with un.Pool(1, backend="thread") as pool:
        with pytest.raises(un.rpc.RemoteError, match=f"mine(.|\n)*{kind.__name__}"):
            pool.submit(tasks.raise_of_kind, kind).result()
        assert pool.submit(tasks.square, 2).result() == 4


def test_workers_share_a_chunk_that_takes_longer_than_expected() -> None:
    with un.Pool(2, backend="thread") as pool:
        # After so many cheap calls, the dear ones are one chunk.
        workers = list(pool.map(tasks.compute, [0.0] * 2000 + [0.06] * 8))
    assert len(workers) == 2008
    assert len(set(workers[2000:])) == 2


def test_callbacks_cannot_wait_for_the_end_of_the_pool() -> None:
    errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def end(_: Future[Any]) -> None:
        try:
            pool.shutdown()
        except RuntimeError as error:
            errors.put(error)

    pool, number = un.Pool(1, backend="thread"), next(_numbers)
    tasks.GATES[number] = threading.Event()
    pool.submit(tasks.hold, number).add_done_callback(end)
    tasks.GATES[number].set()
    assert "wait=False" in str(errors.get(timeout=60))
    pool.shutdown()


def test_a_pool_that_is_dropped_ends_after_its_tasks() -> None:
    pool = un.Pool(1, backend="thread")
    future = pool.submit(tasks.thread_of, 0)
    del pool
    thread = future.result(timeout=60)
    for known in threading.enumerate():
        if known.ident == thread:
            known.join(60)
            assert not known.is_alive()


@pytest.mark.soak
@pytest.mark.parametrize("end", ["", "pool.shutdown(wait=False)", "del pool"])
def test_a_process_ends_after_its_tasks(end: str) -> None:
    program = f"import unisono as un; pool = un.Pool(1, backend='thread'); pool.map(print, range(3)); {end}"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout.split() == ["0", "1", "2"]


def test_chunks_shrink_to_an_even_end() -> None:
    batch = TaskBatch("map", 10_000, lambda *_: b"", lambda *_: None)
    sizes = []
    while batch.todo:
        start, stop = batch.take(2)
        sizes.append(stop - start)
        batch.seconds = 20e-6
    assert sizes[0] == 1
    assert sum(sizes) == 10_000
    assert sizes[1] == 2500
    assert sizes[1:] == sorted(sizes[1:], reverse=True)
    assert 5 <= sizes[-2] <= 50
    assert len(sizes) < 30
    slow = TaskBatch("map", 100, lambda *_: b"", lambda *_: None)
    slow.seconds = 1.0
    assert slow.take(2) == (0, 1)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"workers": 0}, ValueError, "at least 1"),
        ({"workers": "four"}, TypeError, "a communicator or a number"),
        ({"workers": 1, "retries": -1}, ValueError, "retries"),
        ({"workers": 1, "initializer": 3}, TypeError, "initializer"),
        ({"workers": 1, "backend": "sim"}, ValueError, r"Pool\(comm\)"),
        ({"workers": 1, "backend": "mpi"}, ValueError, r"Pool\(comm\)"),
        ({"workers": 1, "backend": "carrier pigeon"}, ValueError, "carrier pigeon"),
    ],
)
def test_bad_arguments_start_nothing(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        un.Pool(**arguments)
