"""Start and end of the agent of the calling thread's rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from unisono.communicator import Communicator
from unisono.core.types import Timeout
from unisono.core.work import positive_timeout
from unisono.rpc.agent import TIMEOUT_S, Agent
from unisono.rpc.context import current_agent, find_agent, leave_agent, set_agent
from unisono.rpc.protocol import WorkerInfo

__all__ = ["get_worker_info", "init", "shutdown"]


def init(
    comm: Communicator,
    name: str | None = None,
    *,
    timeout: Timeout = TIMEOUT_S,
    trusted: bool = False,
    expose: Iterable[Any] = (),
    workers: int = 16,
) -> Agent:
    """Start an agent on each rank of a communicator so that ranks can call each other's functions. Collective.

    Afterwards the functions of this package use this rank's agent: in this thread, in functions called by other
    ranks, and in every thread if the process has only one agent. The agent uses its own message channel; the
    communicator stays usable, and its failure does not affect calls: a rank that dies is lost only to the ranks
    that call it.

    Args:
        comm: Any communicator, including one made by `split`. Closing it ends the agent.
        name: Name of this rank for callers, besides its number; "rank0", "rank1", ... if None.
        timeout: Default of every call: seconds or a `timedelta`.
        trusted: Let peers call anything importable here and send pickled values, which allows them to run
            arbitrary code. Otherwise only exposed functions can be called.
        expose: Functions and classes to expose on this rank only.
        workers: Maximum number of functions running concurrently here; those waiting for other ranks do not count.

    Returns: This rank's agent, which has the same methods as this package has functions.

    Raises:
        ValueError: Two ranks passed the same name.
        CommTimeoutError: Not all ranks joined within the communicator's timeout.

    Example:
        >>> def program(comm):
        ...     agent = un.rpc.init(comm, name=f"worker{comm.rank}")
        ...     info = un.rpc.get_worker_info("worker1")
        ...     un.rpc.shutdown()
        ...     return info.id
        >>> un.launch(program, 2, "thread")
        [1, 1]
    """
    chosen = f"rank{comm.rank}" if name is None else name
    if not isinstance(chosen, str) or not chosen:
        raise ValueError(f"name must be a non-empty str, not {name!r}")
    timeout_s = positive_timeout(timeout)
    if workers < 1:
        raise ValueError(f"workers must be at least 1, not {workers!r}")
    agent = Agent(comm, chosen, timeout_s, trusted, expose, workers)
    set_agent(agent)
    return agent


def get_worker_info(name: str | int | WorkerInfo | None = None) -> WorkerInfo:
    """Return the name and number of a rank.

    Args:
        name: A rank's name or number, or its `WorkerInfo`; this rank if None.
    """
    return cast(Agent, current_agent()).get_worker_info(name)


def shutdown(graceful: bool = True, timeout: Timeout | None = None) -> None:
    """End this rank's agent. No effect if there is none.

    Args:
        graceful: Keep serving until every living rank has called this and all calls are done, including the
            callbacks of their futures. Otherwise end immediately; pending calls fail.
        timeout: Limit (seconds or a `timedelta`) of the wait for the other ranks; no limit if None. Dead ranks are
            not waited for.

    Raises:
        CommTimeoutError: Not all ranks were done in time; this agent keeps running.
        CommError: Called from a function that another rank called; that rank's call would never end.
    """
    agent = find_agent()
    if agent is not None:
        agent.shutdown(graceful, timeout)
        leave_agent(agent)
