"""Lookup of the agent that the functions of this package use: the agent of the calling thread's rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import torch

from unisono.core.types import Timeout
from unisono.errors import CommError
from unisono.rpc.protocol import WorkerInfo
from unisono.rpc.refcount import References

__all__ = [
    "Calls",
    "GraphRecorder",
    "Peers",
    "context",
    "current_agent",
    "find_agent",
    "leave_agent",
    "register",
    "request",
    "set_agent",
    "unregister",
]


class Calls(Protocol):
    """Calls to functions, and to methods of the object with a given key."""

    def rank_of(self, to: Any) -> int:
        """Return the rank of a worker, given its name, rank or `WorkerInfo`."""

    def target(self, to: Any, func: Callable[..., Any], args: Any) -> tuple[int, str, Any, tuple[Any, ...]]:
        """Return the rank, function name, object key and arguments of a call."""

    def call(self, peer: int, target: str, key: Any, args: Any, kwargs: Any, timeout: Timeout | None) -> Any:
        """Call a function on a rank, and wait for the result."""

    def start(self, peer: int, target: str, key: Any, args: Any, kwargs: Any, timeout: Timeout | None) -> Any:
        """Call a function on a rank, and return a future."""

    def make(self, peer: int, target: str, key: Any, args: Any, kwargs: Any, timeout: Timeout | None) -> Any:
        """Call a function on a rank, and return a reference to the result."""


class GraphRecorder(Protocol):
    """Record of the tensors with an autograd history that are sent in messages of an autograd context."""

    def send(self, number: int, peer: int, tensors: list[torch.Tensor]) -> int:
        """Record that a message with some tensors is being sent to a rank; return the message's number, or 0."""

    def receive(self, number: int, peer: int, message: int, tensor: torch.Tensor) -> torch.Tensor:
        """Record a received tensor. Return the tensor, connected to the sender's graph."""

    def backward_from(self, reference: Any, number: int, retain_graph: bool) -> None:
        """In a context, back-propagate from the tensor that a reference points to."""


class Peers(Protocol):
    """Interface of an agent, through which its components reach other components that are created later.

    Attributes:
        rank: This rank.
        infos: Addresses of all ranks.
        closed: Whether the agent is closed, and rejects calls.
        client, references, contexts: Components of the agent.
    """

    @property
    def rank(self) -> int: ...
    @property
    def infos(self) -> Sequence[WorkerInfo]: ...
    @property
    def closed(self) -> bool: ...
    @property
    def client(self) -> Calls: ...
    @property
    def references(self) -> References: ...
    @property
    def contexts(self) -> GraphRecorder: ...
    def shutdown(self, graceful: bool = True, timeout: Timeout | None = None) -> None: ...


_agents: ContextVar[tuple[Peers, ...] | None] = ContextVar("unisono_rpc_agents", default=None)
"""The agents of this thread's rank; the functions of this package use the latest agent."""
context: ContextVar[int] = ContextVar("unisono_rpc_autograd_context", default=-1)
"""The autograd context of this thread."""
request: ContextVar[Any] = ContextVar("unisono_rpc_request", default=None)
"""The call from another rank that this thread is serving."""

_open: weakref.WeakValueDictionary[int, Peers] = weakref.WeakValueDictionary()
"""The agents of this process, for threads that do not belong to a rank."""


def set_agent(agent: Peers) -> None:
    """Make an agent the current agent of this thread's rank."""
    leave_agent(agent)
    _agents.set((*(_agents.get() or ()), agent))


def leave_agent(agent: Peers) -> None:
    """Remove an agent of this thread's rank; the rank's previous agent becomes current again."""
    _agents.set(tuple(other for other in _agents.get() or () if other is not agent and not other.closed))


def register(agent: Peers) -> None:
    """Add an agent of this process. Threads that do not belong to a rank use the agent while no other agent exists."""
    _open[id(agent)] = agent


def unregister(agent: Peers) -> None:
    """Remove an agent of this process."""
    _open.pop(id(agent), None)


def find_agent() -> Peers | None:
    """Return the latest agent of this thread's rank. Threads without a rank get the process's only agent, or None."""
    agents = _agents.get()
    if agents is not None:
        return agents[-1] if agents else None
    # Use `valuerefs`, which copies in one step: iterating over the dictionary would raise if another rank's thread
    # created an agent meanwhile.
    there = [agent for ref in _open.valuerefs() if (agent := ref()) is not None]
    return there[0] if len(there) == 1 else None


def current_agent() -> Peers:
    """Return the agent that `find_agent` returns; raise CommError if there is none."""
    agents = _agents.get()
    agent = agents[-1] if agents else find_agent()
    if agent is None:
        several = len(_open) > 1 and agents is None
        raise CommError(
            "this thread belongs to no rank of this process: use the methods of the agent that rpc.init "
            "returned, or start the thread by its method thread()"
            if several
            else "there is no RPC agent here: call unisono.rpc.init(comm) on every rank first"
        )
    return agent
