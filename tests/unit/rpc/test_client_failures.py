"""Ranks that die, leave or never join: their callers get an error, and other ranks continue."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from typing import Any

import pytest
from rpc_functions import add, census, hold, release
from waiting import wait_until

import unisono as un
from unisono.errors import ClosedError, CommError, CommTimeoutError, PeerLostError
from unisono.rpc.protocol import IDLE
from unisono.testing import run_ranks

rpc = un.rpc
SOON_S = 5.0
KEPT: list[Any] = []


@rpc.expose
def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@rpc.expose
def keep(rref: Any) -> None:
    KEPT.append(rref)


def killed(comm: un.Communicator) -> Any:
    """Rank 2 is killed while rank 0 calls it, and holds an object of rank 1, and another one of rank 0."""
    agent = rpc.init(comm, timeout=30.0)
    if comm.rank != 0:
        rpc.shutdown(timeout=30.0)
        return comm.rank
    key = uuid.uuid4().hex
    before = [rpc.rpc_async(rank, hold, (key,)) for rank in (2, 1)]
    mine, theirs = rpc.RRef([1]), rpc.remote(1, add, (1,))
    for rref in (mine, theirs):
        rpc.rpc_sync(2, keep, (rref,))
    del mine, theirs, rref
    assert wait_until(lambda: (census(), rpc.rpc_sync(1, census)) == (1, 1))
    started = time.monotonic()
    took = []
    for call in (lambda: rpc.rpc_sync(2, die), before[0].wait, lambda: rpc.rpc_sync(2, add, (1,))):
        with pytest.raises(PeerLostError, match="rank 2") as caught:
            call()
        assert caught.value.peer == 2
        took.append(time.monotonic() - started)
    assert max(took) < SOON_S
    # Other calls go on, those that were under way too; the communicator as a whole does not.
    rpc.rpc_sync(1, release, (key,))
    assert before[1].wait()
    assert rpc.rpc_sync(1, add, (1,)) == 2
    with pytest.raises(PeerLostError):
        comm.barrier()
    assert rpc.rpc_sync(1, add, (1,)) == 2
    assert wait_until(lambda: census() == 0 and rpc.rpc_sync(1, census) == 0)
    assert not agent.references.pins
    started = time.monotonic()
    rpc.shutdown(timeout=30.0)
    return time.monotonic() - started < 25.0


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_killed_rank_fails_its_callers(backend: str) -> None:
    ends = _continued(killed, 3, backend)
    assert ends[:2] == [True, 1]
    assert isinstance(ends[2], PeerLostError)


def _continued(program: Any, size: int, backend: str) -> list[Any]:
    return un.launch(program, size, backend, timeout=30.0, on_failure="continue")


def leader_dies(comm: un.Communicator) -> Any:
    """The rank that decides when all end is gone while they wait for its word."""
    agent = rpc.init(comm, timeout=30.0)
    idle: set[int] = set()
    arrived = agent.termination.arrived

    def noted(peer: int, kind: int, words: tuple[Any, ...]) -> None:
        arrived(peer, kind, words)
        if kind == IDLE:
            idle.add(peer)

    agent.termination.arrived = noted  # type: ignore[method-assign]
    comm.barrier()
    if comm.rank == 0:
        assert wait_until(lambda: idle == {1, 2})
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    rpc.shutdown(timeout=30.0)
    return time.monotonic() - started < 25.0


def test_shutdown_does_not_hang_when_ranks_die() -> None:
    ends = _continued(leader_dies, 3, "shm")
    assert ends[1:] == [True, True]


def test_failed_rank_is_lost_to_the_others() -> None:
    def program(comm: un.Communicator) -> Any:
        rpc.init(comm)
        if comm.rank == 1:
            rpc.rpc_sync(0, add, (1,))
            raise KeyError("a mistake")
        with pytest.raises(PeerLostError, match="rank 1"):
            rpc.rpc_sync(1, hold, (uuid.uuid4().hex,))
        rpc.shutdown(timeout=20.0)
        return True

    ends = run_ranks(program, 3, on_failure="continue")
    assert ends[0] is ends[2] is True
    assert isinstance(ends[1], KeyError)


def test_incomplete_init_ends_on_all_ranks() -> None:
    def program(comm: un.Communicator) -> Any:
        if comm.rank == 1:
            # It never comes.
            rpc.shutdown()
            return "nothing to shut down"
        started = time.monotonic()
        with pytest.raises(CommError, match="rank 1"):
            rpc.init(comm)
        rpc.shutdown()
        return time.monotonic() - started < 10.0

    for backend in ("thread", "shm", "gloo"):
        ends = un.launch(program, 3, backend, timeout=1.0, on_failure="continue")
        assert ends == [True, "nothing to shut down", True]


def test_shutdown_waits_for_pending_calls() -> None:
    done: list[int] = []
    ending: list[int] = []

    @rpc.expose
    def chain(depth: int) -> None:
        """No rank waits for the next call. All ranks want to end before the first one is complete."""
        assert wait_until(lambda: len(ending) == 3)
        done.append(depth)
        if depth:
            me = rpc.get_worker_info().id
            rpc.rpc_async((me + 1) % 3, chain, (depth - 1,))

    def program(comm: un.Communicator) -> int:
        agent = rpc.init(comm, expose=[chain])
        wait = agent.termination.wait

        def noted(timeout: Any) -> None:
            ending.append(comm.rank)
            wait(timeout)

        agent.termination.wait = noted  # type: ignore[method-assign]
        if comm.rank == 0:
            rpc.rpc_async(1, chain, (7,))
            rpc.remote(2, chain, (0,))
        rpc.shutdown(timeout=20.0)
        return len(done)

    assert run_ranks(program, 3) == [9, 9, 9]


@pytest.mark.parametrize("ends_it", [False, True], ids=["calls", "ends"])
def test_shutdown_waits_for_callbacks(ends_it: bool) -> None:
    """Calls made by a callback are pending calls, however long the callback takes; it may call shutdown itself."""
    answers: list[Any] = []

    def program(comm: un.Communicator) -> Any:
        agent = rpc.init(comm)

        def go_on(first: Any) -> None:
            # The other rank has long been waiting for the end by now, and this one too.
            wait_until(lambda: agent.termination.over, 0.2)
            if ends_it:
                rpc.shutdown(timeout=10.0)
            answers.append(first.value() + (0 if ends_it else agent.rpc_sync(1, add, (1,))))

        if comm.rank == 0:
            agent.rpc_async(1, add, (1,)).add_done_callback(go_on)
        rpc.shutdown(timeout=20.0)
        return wait_until(lambda: bool(answers))

    assert all(run_ranks(program, 2))
    assert answers == [2 if ends_it else 4]


@rpc.expose
def end_it() -> None:
    rpc.shutdown()


def test_shutdown_inside_a_remote_function_is_rejected() -> None:
    def program(comm: un.Communicator) -> None:
        rpc.init(comm)
        if comm.rank == 0:
            with pytest.raises(CommError, match="its own call would never end"):
                rpc.rpc_sync(1, end_it, timeout=5.0)
        rpc.shutdown(timeout=20.0)

    run_ranks(program, 2)


def test_rank_works_after_a_timed_out_shutdown() -> None:
    """The others wait for it again, until it says so once more."""

    def program(comm: un.Communicator) -> None:
        agent = rpc.init(comm)
        for rank, missing in ((0, r"no report yet from rank 1, 2\."), (2, "rank 0, which decides")):
            if comm.rank == rank:
                with pytest.raises(CommTimeoutError, match=missing):
                    rpc.shutdown(timeout=0.1)
            comm.barrier()
        if comm.rank == 0:
            # Time for the others to find that all are done, which they are not.
            assert not wait_until(lambda: agent.termination.over, 0.3)
            assert agent.rpc_sync(1, add, (1,)) == 2
        rpc.shutdown(timeout=20.0)

    run_ranks(program, 3)


def test_ungraceful_shutdown_does_not_wait() -> None:
    key = uuid.uuid4().hex

    def program(comm: un.Communicator) -> Any:
        agent = rpc.init(comm)
        comm.barrier()
        if comm.rank == 0:
            future = agent.rpc_async(1, hold, (key,))
            agent.shutdown(graceful=False)
            with pytest.raises(ClosedError):
                future.wait()
            return True
        with pytest.raises(PeerLostError, match=r"rank 0 (no longer serves calls: it shut|has left)"):
            agent.rpc_sync(0, hold, (key,))
        release(key)
        agent.shutdown(timeout=20.0)
        return True

    assert run_ranks(program, 2) == [True, True]


def test_shutdown_reports_its_timeout() -> None:
    def program(comm: un.Communicator) -> Any:
        agent = rpc.init(comm)
        if comm.rank == 0:
            with pytest.raises(CommTimeoutError, match="Did every rank call shutdown"):
                rpc.shutdown(timeout=0.1)
            assert agent.rpc_sync(1, add, (1,)) == 2
        comm.barrier()
        agent.shutdown(timeout=20.0)
        return True

    assert run_ranks(program, 2) == [True, True]


def test_closing_the_communicator_closes_the_agent() -> None:
    def program(comm: un.Communicator) -> Any:
        half = comm.dup()
        agent = rpc.init(half)
        comm.barrier()
        before = threading.active_count()
        comm.close()
        assert agent.closed
        with pytest.raises(ClosedError):
            agent.rpc_sync(comm.rank, add, (1,))
        return before > 0

    assert run_ranks(program, 2) == [True, True]
