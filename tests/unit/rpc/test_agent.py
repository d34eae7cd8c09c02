"""Agents: their threads, their names, several of them, and wrong arguments."""

from __future__ import annotations

import contextvars
import threading
import weakref
from typing import Any

import pytest
from rpc_functions import add, on_rank_0
from waiting import wait_until

import unisono as un
from unisono.errors import ClosedError, CommError
from unisono.testing import pool, run_ranks

rpc = un.rpc


@rpc.expose
def from_a_thread() -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(rpc.rpc_sync(0, add, (41,))))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_threads_of_a_process_find_its_agent(backend: str) -> None:
    program = on_rank_0(lambda: rpc.rpc_sync(1, from_a_thread))
    assert pool(backend).run(program, size=2)[0] == 42


def test_agent_threads_belong_to_its_rank() -> None:
    def program(comm: un.Communicator) -> Any:
        agent, found = rpc.init(comm), list[Any]()
        agent.thread(lambda number: found.append(rpc.get_worker_info().id + number), 10).join()
        rpc.shutdown()
        return found

    assert run_ranks(program, 2) == [[10], [11]]


def test_thread_without_a_rank_is_an_error() -> None:
    def program(comm: un.Communicator) -> Any:
        agent = rpc.init(comm)
        comm.barrier()
        found: list[Any] = []

        def foreign() -> None:
            try:
                rpc.get_worker_info()
            except CommError as error:
                found.append(str(error))
            found.append(agent.rpc_sync(1 - comm.rank, add, (1,)))

        thread = threading.Thread(target=foreign)
        # Threads inherit the context, and so the rank, where there is no GIL.
        contextvars.Context().run(thread.start)
        thread.join()
        rpc.shutdown()
        return found

    for text, answer in run_ranks(program, 2):
        assert "its method thread()" in text
        assert answer == 2
    with pytest.raises(CommError, match=r"rpc\.init"):
        rpc.rpc_sync(0, add)


def test_two_agents_in_one_process() -> None:
    def program(comm: un.Communicator) -> Any:
        first = rpc.init(comm, f"first{comm.rank}")
        half = comm.split(comm.rank % 2)
        second = rpc.init(half, f"second{comm.rank}")
        answers = first.rpc_sync((comm.rank + 1) % 4, add, (1,)), second.rpc_sync(1 - half.rank, add, (2,))
        current = rpc.get_worker_info().name
        second.shutdown()
        first.shutdown()
        with pytest.raises(ClosedError, match="shut down"):
            first.rpc_sync(0, add, (1,))
        return *answers, current

    assert run_ranks(program, 4) == [(2, 3, f"second{rank}") for rank in range(4)]


def test_rank_after_shutdown_uses_no_other_agent() -> None:
    """Ranks as threads share a process, where one agent may be left."""

    def program(comm: un.Communicator) -> None:
        agent = rpc.init(comm)
        comm.barrier()
        if comm.rank == 0:
            for _ in range(2):
                rpc.shutdown(graceful=False)
                with pytest.raises(CommError, match=r"no RPC agent here: call unisono\.rpc\.init"):
                    rpc.rpc_sync(1, add, (1,))
        comm.barrier()
        assert agent.closed == (comm.rank == 0)
        comm.barrier()
        rpc.shutdown()

    run_ranks(program, 2)


def test_first_agent_is_current_after_shutdown_of_the_second() -> None:
    def program(comm: un.Communicator) -> None:
        agents = [rpc.init(comm, f"{number} of {comm.rank}") for number in ("first", "second")]
        assert rpc.get_worker_info().name == f"second of {comm.rank}"
        rpc.shutdown()
        assert rpc.rpc_sync(f"first of {1 - comm.rank}", add, (1,)) == 2
        rpc.shutdown()
        assert all(agent.closed for agent in agents)

    run_ranks(program, 2)


def test_communicator_frees_closed_agents() -> None:
    def program(comm: un.Communicator) -> None:
        known = [weakref.ref(rpc.init(comm))]
        rpc.shutdown()
        agent = rpc.init(comm)
        known.append(weakref.ref(agent))
        agent.shutdown(graceful=False)
        rpc.shutdown()
        del agent
        assert wait_until(lambda: [ref() for ref in known] == [None, None])

    run_ranks(program, 2)


def test_names_are_different() -> None:
    def program(comm: un.Communicator) -> Any:
        with pytest.raises(ValueError, match="several ranks passed the name 'same'"):
            rpc.init(comm, "same")
        rpc.shutdown()
        rpc.init(comm, f"other{comm.rank}")
        rpc.shutdown()
        rpc.shutdown()
        return True

    assert all(run_ranks(program, 2))


@pytest.mark.parametrize("wrong", [{"name": ""}, {"name": 3}, {"timeout": 0}, {"workers": 0}])
def test_init_rejects_wrong_arguments(wrong: dict[str, Any]) -> None:
    with un.init() as comm, pytest.raises(ValueError, match=next(iter(wrong))):
        rpc.init(comm, **wrong)


def test_expose_rejects_wrong_objects() -> None:
    with pytest.raises(TypeError, match="not a int"):
        rpc.expose(3)
    with pytest.raises(TypeError, match="no name"):
        rpc.expose([].append)


def test_single_rank() -> None:
    with un.init() as comm:
        rpc.init(comm)
        assert rpc.rpc_sync(0, add, (1,)) == 2
        assert rpc.remote("rank0", add, (1,)).to_here() == 2
        rpc.shutdown()
