"""Lookup of the agent that the functions of this package act on: that of the calling thread's rank."""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from unisono.errors import CommError

if TYPE_CHECKING:
    from unisono.rpc.agent import Agent

__all__ = ["context", "current_agent", "find_agent", "leave_agent", "register", "request", "set_agent", "unregister"]

_agents: ContextVar[tuple[Agent, ...] | None] = ContextVar("unisono_rpc_agents", default=None)
context: ContextVar[int] = ContextVar("unisono_rpc_autograd_context", default=-1)
"""The context of autograd that this thread is in."""
request: ContextVar[Any] = ContextVar("unisono_rpc_request", default=None)
"""The call of another rank that this thread serves."""

_open: weakref.WeakSet[Agent] = weakref.WeakSet()


def set_agent(agent: Agent) -> None:
    """This thread's rank has this agent, besides those that it has already."""
    _agents.set((*(other for other in _agents.get() or () if other is not agent and not other.closed), agent))


def leave_agent(agent: Agent) -> None:
    """This thread's rank has it no more: the one before it counts again, or none, and never another rank's."""
    _agents.set(tuple(other for other in _agents.get() or () if other is not agent and not other.closed))


def register(agent: Agent) -> None:
    """A thread that was started by other means finds it, where it is the only one of its process."""
    _open.add(agent)


def unregister(agent: Agent) -> None:
    """It serves no more."""
    _open.discard(agent)


def find_agent() -> Agent | None:
    """The latest agent of this thread's rank; for a thread that never had one, the only one of this process."""
    agents = _agents.get()
    if agents is not None:
        return agents[-1] if agents else None
    there = list(_open)
    return there[0] if len(there) == 1 else None


def current_agent() -> Agent:
    """The same, or an error that says what to do."""
    agent = find_agent()
    if agent is None:
        several = len(_open) > 1 and _agents.get() is None
        raise CommError(
            "this thread belongs to no rank of this process: use the methods of the agent that rpc.init "
            "returned, or start the thread by its method thread()"
            if several
            else "there is no RPC agent here: call unisono.rpc.init(comm) on every rank first"
        )
    return agent
