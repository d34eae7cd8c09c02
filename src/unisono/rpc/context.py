"""Lookup of the agent that the functions of this package act on: that of the calling thread's rank."""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from typing import Any

from unisono.errors import CommError

__all__ = ["context", "current_agent", "find_agent", "leave_agent", "register", "request", "set_agent", "unregister"]

# Agents are `Any`: the modules that an agent is made of call `current_agent`, and cannot import it.
_agents: ContextVar[tuple[Any, ...] | None] = ContextVar("unisono_rpc_agents", default=None)
context: ContextVar[int] = ContextVar("unisono_rpc_autograd_context", default=-1)
"""The context of autograd that this thread is in."""
request: ContextVar[Any] = ContextVar("unisono_rpc_request", default=None)
"""The call of another rank that this thread serves."""

_open: weakref.WeakSet[Any] = weakref.WeakSet()


def set_agent(agent: Any) -> None:
    """Make an agent the latest one of this thread's rank."""
    leave_agent(agent)
    _agents.set((*(_agents.get() or ()), agent))


def leave_agent(agent: Any) -> None:
    """Remove an agent from those of this thread's rank; the one before it counts again, never another rank's."""
    _agents.set(tuple(other for other in _agents.get() or () if other is not agent and not other.closed))


def register(agent: Any) -> None:
    """Add an agent to those of this process: threads started by other means use it if it is the only one."""
    _open.add(agent)


def unregister(agent: Any) -> None:
    """Remove an agent from those of this process."""
    _open.discard(agent)


def find_agent() -> Any:
    """Return the latest agent of this thread's rank; for other threads the only one of this process; None if none."""
    agents = _agents.get()
    if agents is not None:
        return agents[-1] if agents else None
    there = list(_open)
    return there[0] if len(there) == 1 else None


def current_agent() -> Any:
    """Return the same agent. Raises CommError if there is none."""
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
