"""`launch(..., on=executor)`: ranks on process pools, Dask and MPI's futures."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import close_and_work_on, die, host_rank, new_pool, train

import unisono as un
from unisono.errors import CommError, CommTimeoutError, PeerLostError
from unisono.host.mpi_library import find_mpirun

SHUT_DOWN_WITHIN_S = 30.0
KNOWN_WITHIN_S = 10.0
"""On a busy machine; 0.2 s on an idle one."""


@pytest.fixture(scope="module")
def pool() -> Iterator[Executor]:
    """Four workers, for all tests that leave them as they were."""
    with new_pool(4) as made:
        yield made


@pytest.mark.parametrize("ranks", [2, 4])
def test_pool_computes_what_launch_computes(pool: Executor, ranks: int) -> None:
    found = un.launch(train, ranks, args=(3,), on=pool, deterministic=True)
    assert found == un.launch(train, ranks, args=(3,), deterministic=True)
    assert found[0][0] == "shm"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait only briefly for ranks and executors of which nothing more is to come."""
    monkeypatch.setattr("unisono.launcher.supervisor.GRACE_S", 0.1)
    monkeypatch.setattr("unisono.launcher.engines.END_S", 0.1)
    monkeypatch.setattr("unisono.launcher.engines._EXPLAIN_WITHIN_S", 0.1)


def backend_and_hosts(comm: un.Communicator) -> tuple[str, Any, int]:
    return comm.backend, comm.hosts, torch.get_num_threads()


def test_hosts_choose_the_backend(pool: Executor) -> None:
    halves = ((0, 1), (2, 3))
    assert un.launch(backend_and_hosts, 4, on=pool, hosts=halves) == [("shm+tcp", halves, 1)] * 4
    assert un.launch(backend_and_hosts, 2, "tcp", on=pool, threads=2) == [("tcp", ((0, 1),), 2)] * 2
    assert un.launch(backend_and_hosts, 1, on=pool)[0][:2] == ("thread", ((0,),))


def test_gang_that_cannot_be_had_ends_in_time() -> None:
    before = set(threading.enumerate())
    with new_pool(2) as small:
        # A worker starts in seconds on a busy machine, and ranks that have come make the first launch no shorter.
        assert un.launch(lambda comm: comm.rank, 2, on=small) == [0, 1]
        begin = time.monotonic()
        with pytest.raises(CommTimeoutError, match=r"2 of 4 ranks arrived within 1 s; give the ProcessPoolExecutor"):
            un.launch(lambda comm: comm.rank, 4, on=small, timeout=1)
        assert time.monotonic() - begin < KNOWN_WITHIN_S
        assert un.launch(lambda comm: comm.rank, 2, on=small) == [0, 1]
        left = set(threading.enumerate()) - before
        assert not [thread for thread in left if thread.name.startswith("unisono")]


def fail(comm: un.Communicator) -> None:
    if comm.rank == 1:
        raise KeyError("no such column")
    comm.barrier()


def test_error_of_the_program_has_the_users_line(pool: Executor) -> None:
    with pytest.raises(KeyError, match="no such column") as caught:
        un.launch(fail, 3, on=pool)
    text = "".join(traceback.format_exception(caught.value))
    assert 'raise KeyError("no such column")' in text
    assert "raised on rank 1 of 3" in text
    assert un.launch(lambda comm: comm.rank, 3, on=pool) == [0, 1, 2]


def fail_before_the_others_are_there(comm: un.Communicator) -> None:
    raise AssertionError


class Unreadable:
    """An argument that no worker can read."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


def test_failure_before_all_have_met_ends_all(pool: Executor) -> None:
    begin = time.monotonic()
    with pytest.raises(ValueError, match="invalid literal"):
        un.launch(fail_before_the_others_are_there, 4, args=(Unreadable(),), on=pool)
    assert time.monotonic() - begin < KNOWN_WITHIN_S


def test_killed_worker_is_named() -> None:
    with new_pool(3) as mortal:
        assert un.launch(lambda comm: comm.rank, 3, on=mortal) == [0, 1, 2]
        begin = time.monotonic()
        with pytest.raises(PeerLostError, match="rank 1 of 3 was lost: BrokenProcessPool") as caught:
            un.launch(die, 3, on=mortal)
        assert time.monotonic() - begin < KNOWN_WITHIN_S
    assert caught.value.peer == 1


def state() -> dict[str, Any]:
    """Return the state of a worker, without parts that differ each time."""
    return {
        "process": os.getpid(),
        "descriptors": sorted(Path("/proc/self/fd").iterdir()),
        "threads": [thread.name for thread in threading.enumerate()],
        "torch": torch.get_num_threads(),
        "environment": dict(os.environ),
        "group": torch.distributed.is_initialized(),
        "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
    }


def leave_traces(comm: un.Communicator, folder: str) -> None:
    os.environ["TRACE"] = "1"
    os.environ.pop("PATH")
    signal.signal(signal.SIGUSR1, lambda *_: None)
    torch.set_num_threads(3)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=comm.rank, world_size=1)
    comm.all_reduce(torch.ones(1000))
    if comm.size == 1:
        raise RuntimeError("also after an error")


def test_worker_is_left_as_it_was_found(tmp_path: Path) -> None:
    with new_pool(1) as single:
        # What torch opens at its first use remains.
        with pytest.raises(RuntimeError, match="also after"):
            un.launch(leave_traces, 1, "tcp", args=(str(tmp_path),), on=single)
        before = single.submit(state).result()
        (tmp_path / "store").unlink(missing_ok=True)
        with pytest.raises(RuntimeError, match="also after"):
            un.launch(leave_traces, 1, "tcp", args=(str(tmp_path),), on=single)
        assert single.submit(state).result() == before
        assert "TRACE" not in before["environment"]
        assert not before["group"]


def test_workers_keep_nothing_of_several_ranks(pool: Executor) -> None:
    def states() -> dict[int, dict[str, Any]]:
        return {found["process"]: found for found in [pool.submit(state).result() for _ in range(8)]}

    un.launch(train, 4, args=(1,), on=pool)
    before = states()
    un.launch(train, 4, args=(1,), on=pool)
    un.launch(train, 4, "tcp", args=(1,), on=pool)
    after = states()
    assert before.keys() & after.keys()
    for process in before.keys() & after.keys():
        assert after[process] == before[process]


class Retrying(Executor):
    """An executor that runs each task once more after its end, as one does that has lost a worker with its result."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.first: list[Future[Any]] = []

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        second: Future[Any] = Future()

        def again(_: Future[Any]) -> None:
            self.inner.submit(function, *args, **kwargs).add_done_callback(
                lambda done: second.set_result(done.result())
            )

        first = self.inner.submit(function, *args, **kwargs)
        self.first.append(first)
        first.add_done_callback(again)
        return second


@pytest.mark.usefixtures("impatient")
def test_second_start_of_a_rank_is_refused(pool: Executor) -> None:
    retrying = Retrying(pool)
    with pytest.raises(PeerLostError, match=r"rank \d of 2 was lost: its worker has ended, and a second start is ref"):
        un.launch(lambda comm: comm.barrier(), 2, on=retrying)
    assert [future.result(SHUT_DOWN_WITHIN_S) for future in retrying.first]


def test_start_after_the_end_is_refused_at_once(pool: Executor) -> None:
    late: list[Any] = []

    class Remembering(Retrying):
        def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            late[:] = function, *args
            return self.inner.submit(function, *args, **kwargs)

    assert un.launch(lambda comm: comm.rank, 1, on=Remembering(pool)) == [0]
    assert b"launch has ended before this rank has started" in pool.submit(*late).result(SHUT_DOWN_WITHIN_S)


class Losing(Executor):
    """An executor that loses the results of rank 0, or cancels its task when that has ended."""

    def __init__(self, inner: Executor, *, cancels: bool = False, reason: str | None = None) -> None:
        self.inner = inner
        self.cancels = cancels
        self.reason = reason

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = self.inner.submit(function, *args, **kwargs)
        if args[0]:
            return future
        never: Future[Any] = Future()
        if self.cancels:
            future.add_done_callback(lambda _: never.cancel())
        return never

    def why_lost(self, future: Future[Any]) -> str | None:
        assert not future.done()
        return self.reason


@pytest.mark.parametrize(
    ("how", "timeout", "text"),
    [
        ({"reason": "gone"}, 300, "rank 0 of 2 has ended, but Losing lost its result: gone"),
        ({"cancels": True}, 300, "rank 0 of 2 was lost: Losing cancelled its task, which had started, as when"),
        pytest.param(
            *({}, 20, "rank 0 of 2 has ended, but Losing lost its result: it has not arrived within 20 s"),
            marks=pytest.mark.soak,
        ),
    ],
)
@pytest.mark.usefixtures("impatient")
def test_rank_whose_result_is_lost_is_named(pool: Executor, how: dict[str, Any], timeout: float, text: str) -> None:
    # A worker starts in seconds on a busy machine, and the timeout holds for ranks that meet, too.
    assert un.launch(lambda comm: comm.rank, 4, on=pool) == [0, 1, 2, 3]
    begin = time.monotonic()
    with pytest.raises(PeerLostError, match=text) as caught:
        un.launch(lambda comm: comm.rank, 2, on=Losing(pool, **how), timeout=timeout)
    assert caught.value.peer == 0
    lost, result = un.launch(lambda comm: comm.rank, 2, on=Losing(pool, **how), timeout=timeout, on_failure="continue")
    assert (str(lost), result) == (str(caught.value), 1)
    assert time.monotonic() - begin < 2 * (KNOWN_WITHIN_S if how else KNOWN_WITHIN_S + timeout)


class Deaf(Executor):
    """An executor that never learns how a task ends, as Dask does not of one that is bound to a worker that left."""

    def __init__(self) -> None:
        self.processes: list[Any] = []

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        process = multiprocessing.get_context("forkserver").Process(target=host_rank, args=(function, args))
        process.start()
        self.processes.append(process)
        return Future()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for process in self.processes:
            process.terminate()
            process.join()


@pytest.mark.parametrize("end", [pytest.param("killed", marks=pytest.mark.soak), "told to end"])
@pytest.mark.usefixtures("impatient")
def test_worker_that_ends_under_a_rank_without_communicator_is_noticed(end: str) -> None:
    with Deaf() as deaf, pytest.raises(PeerLostError, match="rank 1 of 2 was lost: its worker has ended"):
        un.launch(close_and_work_on, 2, on=deaf, args=(end,))


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"on": 4}, TypeError, r"on= must be the name of an engine such as 'ray', .* ProcessPoolExecutor\(4\), not 4"),
        ({"on": "rya"}, ValueError, "unknown engine 'rya'; known: dask, local, mpi, ray, submitit; did you mean 'ray'"),
        ({"on": un.engines.Ray}, TypeError, "an engine such as un.engines.Ray"),
        ({"backend": "thread"}, ValueError, "'thread' cannot run on an executor"),
        ({"backend": "mpi"}, ValueError, "'mpi' cannot run on an executor"),
        ({"backend": "tpc"}, ValueError, "tpc"),
        ({"seed": 3}, ValueError, "only simulated ranks have a seed"),
    ],
)
def test_what_cannot_be_is_refused(pool: Executor, given: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        un.launch(lambda comm: comm.rank, **{"nprocs": 2, "on": pool, **given})


def test_threads_are_refused() -> None:
    with ThreadPoolExecutor(2) as threads, pytest.raises(CommError, match="each rank needs a process of its own"):
        un.launch(lambda comm: comm.rank, 2, on=threads)


MPI_PROGRAM = """
import unisono as un
from mpi4py.futures import MPIPoolExecutor

def program(comm):
    return comm.rank, comm.size, comm.backend

if __name__ == "__main__":
    with MPIPoolExecutor() as pool:
        print(un.launch(program, 2, on=pool))
"""


@pytest.mark.soak
@pytest.mark.skipif(find_mpirun() is None, reason="needs mpirun")
def test_futures_of_mpi(start: Any, tmp_path: Path) -> None:
    from unisono.host.mpi_library import mpirun_environment

    (tmp_path / "program.py").write_text(MPI_PROGRAM)
    command = [find_mpirun(), "-n", "3", sys.executable, "-m", "mpi4py.futures", tmp_path / "program.py"]
    out, err = start(command, mpirun_environment(os.environ, crowded=True)).communicate(timeout=300)
    assert "[(0, 2, 'shm'), (1, 2, 'shm')]" in out, err


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_dask() -> None:
    distributed = pytest.importorskip("distributed", reason="runs ranks on Dask")
    options = {"processes": True, "threads_per_worker": 1, "dashboard_address": None, "silence_logs": logging.CRITICAL}
    with distributed.LocalCluster(n_workers=3, **options) as cluster, distributed.Client(cluster) as client:
        workers = client.get_executor()
        assert un.launch(train, 3, args=(3,), on=workers, deterministic=True) == un.launch(
            train, 3, args=(3,), deterministic=True
        )
        with pytest.raises(KeyError, match="no such column"):
            un.launch(fail, 3, on=workers)
        with pytest.raises(CommTimeoutError, match="3 of 4 ranks arrived within 20 s"):
            un.launch(train, 4, args=(3,), on=workers, timeout=20)
        begin = time.monotonic()
        results = un.launch(die, 3, on=workers, on_failure="continue")
        assert time.monotonic() - begin < KNOWN_WITHIN_S
        assert isinstance(results[1], PeerLostError)
        assert re.match("rank 1 of 3 was lost", results[1].message)
        assert max(results[0], results[2]) < KNOWN_WITHIN_S
        assert [result[0] for result in un.launch(train, 3, args=(3,), on=workers)] == ["shm"] * 3
