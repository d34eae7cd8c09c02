"""Unreferenced communicators that were not closed are freed, and their threads end."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from insides import control_of, engine_of, transport_of
from waiting import wait_until

import unisono as un
from unisono.comm.teardown import Teardown
from unisono.control import LocalHub
from unisono.core.group import Group
from unisono.core.transport import Options
from unisono.errors import CommTimeoutError, PeerLostError
from unisono.transports.thread import ThreadTransport

BACKENDS = [pytest.param("thread", marks=pytest.mark.soak), "shm", pytest.param("gloo", marks=pytest.mark.soak)]
SOON_S = 20.0

Start = Callable[[int], un.Communicator]


@pytest.fixture
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Start:
    """Create the communicators of two ranks, which are threads of this process, without further references."""
    backend: str = request.param
    if backend != "thread":
        where = f"file://{tmp_path}/meeting"
        return lambda rank: un.init(backend, init_method=where, rank=rank, world_size=2, timeout=SOON_S)
    hub, options = LocalHub(), Options("thread", timeout_s=SOON_S)

    def on_hub(rank: int) -> un.Communicator:
        control = hub.control()
        comm = un.Communicator(ThreadTransport.connect(Group.world(rank, 2), control, options), control, options)
        comm.after_close(control.close)
        return comm

    return on_hub


def both(program: Callable[[int], Any]) -> list[Any]:
    """Return its results on two threads."""
    ends: dict[int, Any] = {}
    threads = [threading.Thread(target=lambda rank=rank: ends.update({rank: program(rank)})) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    return [ends[rank] for rank in range(2)]


def threads() -> int:
    """All of this process, also those that Python does not know."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def thread_names() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def used(comm: un.Communicator) -> un.Communicator:
    """With all the threads that it makes."""
    t = torch.ones(4)
    comm.all_reduce(t, algorithm="ring", async_op=True).wait()
    assert t.tolist() == [2.0] * 4
    return comm


@pytest.mark.parametrize("start", BACKENDS, indirect=True)
def test_unreferenced_communicator_is_freed_with_its_threads(start: Start) -> None:
    def program(rank: int) -> list[Any]:
        comm = used(start(rank))
        part = used(comm.dup())
        made.append(threads())
        return [weakref.ref(held) for held in (comm, part, engine_of(comm), engine_of(part))]

    made: list[int] = []
    before = threads()
    refs = [ref for end in both(program) for ref in end]
    assert max(made) > before + 2
    assert wait_until(lambda: threads() <= before)
    assert [ref() for ref in refs] == [None] * 8


@pytest.mark.parametrize("start", BACKENDS, indirect=True)
def test_subgroups_are_freed_before_the_parent(start: Start) -> None:
    """Their thread ends immediately; the rest is freed with the next subgroup, since all ranks have dropped them."""

    def dropped(comm: un.Communicator) -> Teardown:
        part = used(comm.dup())
        ref, ending = weakref.ref(part), engine_of(part).ending
        group = transport_of(part).group
        helper = f"unisono {group.name} rank {group.rank}"
        assert helper in thread_names()
        del part
        assert wait_until(lambda: ref() is None)
        assert wait_until(lambda: helper not in thread_names())
        return ending

    def program(rank: int) -> list[tuple[bool, bool]]:
        ends = []
        with start(rank) as comm:
            for _ in range(3):
                ending = dropped(comm)
                before = ending.over
                comm.dup().close()
                ends.append((before, ending.over))
            assert engine_of(comm).ending.left() == []
        return ends

    assert both(program) == [[(False, True)] * 3] * 2


@pytest.mark.parametrize("start", BACKENDS, indirect=True)
def test_subgroup_held_by_one_rank_stays(start: Start) -> None:
    def program(rank: int) -> list[bool]:
        over = []
        with start(rank) as comm:
            part = comm.dup()
            ending, kept = engine_of(part).ending, [part] if rank == 1 else []
            del part
            for _ in range(2):
                comm.dup().close()
                over.append(ending.over)
                kept.clear()
        return over

    assert both(program) == [[False, True]] * 2


@pytest.mark.parametrize("start", BACKENDS, indirect=True)
def test_subgroups_and_works_keep_the_communicator(start: Start) -> None:
    def program(rank: int) -> list[float]:
        comm = start(rank)
        t, u = torch.ones(2), torch.full((2,), float(rank))
        part, work = comm.dup(), comm.all_reduce(t, algorithm="ring", async_op=True)
        message = comm.isend(u, 1) if rank == 0 else comm.irecv(u, 0)
        ref = weakref.ref(comm)
        del comm
        assert wait_until(lambda: ref() is None)
        work.wait()
        message.wait()
        del work, message
        gc.collect()
        part.all_reduce(t)
        part.barrier()
        return [*t.tolist(), *u.tolist()]

    assert both(program) == [[4.0, 4.0, 0.0, 0.0]] * 2


@pytest.mark.parametrize("start", BACKENDS, indirect=True)
def test_agent_keeps_the_communicator(start: Start) -> None:
    def program(rank: int) -> int:
        comm = start(rank)
        agent, engine = un.rpc.init(comm, expose=[divmod]), weakref.ref(engine_of(comm))
        del comm
        gc.collect()
        assert engine() is not None
        answer: int = agent.rpc_sync(1 - rank, divmod, (7, 2))[0]
        agent.shutdown(timeout=SOON_S)
        assert wait_until(lambda: engine() is None)
        return answer

    assert both(program) == [3, 3]


@pytest.mark.parametrize("start", BACKENDS, indirect=True)
def test_waiting_rank_learns_of_a_dropped_communicator(start: Start) -> None:
    def program(rank: int) -> str:
        comm = start(rank)
        if rank == 0:
            return ""
        with pytest.raises(PeerLostError) as caught:
            comm.barrier()
        return str(caught.value)

    assert "rank 0 has left" in both(program)[1]


@pytest.mark.parametrize("start", ["thread"], indirect=True)
def test_dropped_subgroup_is_reported_to_its_ranks(start: Start) -> None:
    def program(rank: int) -> str:
        comm = start(rank)
        part = comm.dup()
        if rank == 0:
            del part
            with pytest.raises(KeyError), comm:
                raise KeyError("no such sample")
            return ""
        with pytest.raises(PeerLostError) as caught:
            part.barrier()
        return str(caught.value)

    assert "rank 0 failed in the program: KeyError: 'no such sample'" in both(program)[1]


@pytest.mark.parametrize("start", ["thread", "shm"], indirect=True)
def test_reports_show_a_failed_communicator_that_was_dropped(start: Start) -> None:
    def program(rank: int) -> list[tuple[int, bool]]:
        with start(rank) as comm:
            part = comm.dup()
            ending = engine_of(part).ending
            if rank == 0:
                with pytest.raises(CommTimeoutError):
                    part.recv(torch.ones(1), 1, timeout=0.1)
            comm.barrier()
            del part
            # A collection does nothing while another thread's is under way.
            assert wait_until(lambda: ending.dropped)
            # All ranks have dropped it, so this closes it.
            comm.dup().close()
            assert ending.over
            reports = control_of(comm).query(None, SOON_S).values()
            comm.barrier()
        groups = [group for report in reports if report is not None for group in report["groups"]]
        return [(group["rank"], group["broken"]) for group in groups if group["group"] == ending.group.name]

    assert both(program) == [[(0, True)]] * 2


@pytest.mark.parametrize("start", ["shm"], indirect=True)
def test_forked_copy_can_be_dropped(start: Start) -> None:
    def program(rank: int) -> bool:
        comm = start(rank)
        ending, engine = engine_of(comm).ending, weakref.ref(engine_of(comm))
        # What a fork's copy of it is.
        ending._process = -1
        control = control_of(comm)
        del comm
        assert wait_until(lambda: engine() is None)
        control.exchange(ending.group, "here", None, SOON_S)
        over = ending.over
        control.exchange(ending.group, "done", None, SOON_S)
        ending.close(0.0)
        # It was no fork.
        ending._process = os.getpid()
        ending.close(0.0)
        return over

    assert both(program) == [False, False]
