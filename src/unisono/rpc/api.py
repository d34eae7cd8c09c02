"""The functions that act on the agent of the rank whose thread calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from unisono.communicator import Communicator
from unisono.rpc.agent import TIMEOUT_S, Agent, WorkerInfo
from unisono.rpc.context import current_agent, find_agent, leave_agent, set_agent
from unisono.rpc.pending_calls import CallFuture
from unisono.rpc.rref import RRef

__all__ = ["get_worker_info", "init", "remote", "rpc_async", "rpc_sync", "shutdown"]

_To = str | int | WorkerInfo


def init(
    comm: Communicator,
    name: str | None = None,
    *,
    timeout: float = TIMEOUT_S,
    trusted: bool = False,
    expose: Iterable[Any] = (),
    workers: int = 16,
) -> Agent:
    """Let the ranks of a communicator call each other's functions. Collective: every rank calls it.

    From then on the functions of this package act on this rank's agent, in this thread, in functions that others
    call, and, where the process has one agent only, in every thread. The agent has messages of its own; the
    communicator goes on as before, and may even break without the calls being touched: a rank that dies is lost
    to those who call it, and to nobody else.

    Args:
        comm: Any communicator, also a part made by `split`. Closing it ends the agent.
        name: By which others can call this rank, besides its number; "rank0", "rank1", ... if None.
        timeout: Seconds that a call may take unless it says otherwise.
        trusted: Let others call anything that can be imported here, and send pickled values: they may do here
            what they like. Without it only what is exposed can be called.
        expose: Functions and classes to expose on this rank alone.
        workers: How many functions may run at once here; those that wait for other ranks do not count.

    Raises:
        ValueError: Two ranks gave the same name.
        CommTimeoutError: Not all ranks came, within the communicator's timeout.

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
        raise ValueError(f"name must be some text, not {name!r}")
    if not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds, not {timeout!r}")
    if workers < 1:
        raise ValueError(f"workers must be at least 1, not {workers!r}")
    agent = Agent(comm, chosen, timeout, trusted, expose, workers)
    set_agent(agent)
    return agent


def rpc_sync(
    to: _To,
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> Any:
    """Call a function on another rank, and return what it returns.

    Args:
        to: A rank's name or number, or its `WorkerInfo`; this rank too.
        func: Exposed there by `expose`. Only its name travels.
        args: Plain values, containers, dataclasses, tensors, `RRef`s, exposed functions.
        kwargs: Likewise.
        timeout: Seconds; the agent's if None.

    Raises:
        Exception: What the function raised: of the same class where that is known here, with the remote
            traceback in its text. It is a `RemoteError` too.
        NotExposedError: The function cannot be called there, and nothing ran; or what it returned is, or has in it, a
            function that is not exposed here.
        CommTimeoutError: No answer in time; the function may run on.
        PeerLostError: That rank died, or shut down.
        TypeError: An argument cannot be sent; the message says which.
        ValueError: There is no such rank, or the timeout is not positive.

    Cost: on shared memory about 30 us and two copies of each tensor's bytes.
    """
    return current_agent().rpc_sync(to, func, args, kwargs, timeout)


def rpc_async(
    to: _To,
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> CallFuture:
    """As `rpc_sync`, but return a `torch.futures.Future` at once, which also has `cancel()`.

    When this returns, the arguments have been sent and may be changed. It waits if very much is under way to
    that rank already (16384 calls, or 256 MiB), until some of that is answered.
    """
    return current_agent().rpc_async(to, func, args, kwargs, timeout)


def remote(
    to: _To,
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> RRef[Any]:
    """As `rpc_async`, but the result stays where it is made: return an `RRef` to it at once.

    What the function raises, `RRef.to_here` raises.
    """
    return current_agent().remote(to, func, args, kwargs, timeout)


def get_worker_info(name: _To | None = None) -> WorkerInfo:
    """Name and number of a rank; of this one if None."""
    return current_agent().get_worker_info(name)


def shutdown(graceful: bool = True, timeout: float | None = None) -> None:
    """End this rank's agent. Harmless if there is none.

    Args:
        graceful: Serve on until every rank that lives has called this, and all calls are done, with the callbacks
            of their futures. Otherwise end at once; calls that are under way end with an error.
        timeout: Seconds to wait for the others, with `CommTimeoutError` at their end; without limit if None. Ranks
            that die are not waited for.

    Raises:
        CommTimeoutError: Not all ranks were done in time; this agent goes on as before.
        CommError: It was called by a function that another rank called, whose own call would never end.
    """
    agent = find_agent()
    if agent is not None:
        agent.shutdown(graceful, timeout)
        leave_agent(agent)
