"""One rank's agent: makes calls, serves those of other ranks, and shuts down in order."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any

from unisono.communicator import Communicator
from unisono.control.process_exit import close_at_exit
from unisono.core.types import Timeout
from unisono.core.work import resolve_timeout
from unisono.errors import CommError, CommTimeoutError
from unisono.rpc.autograd.contexts import Contexts
from unisono.rpc.client import Client
from unisono.rpc.context import register, set_agent, unregister
from unisono.rpc.exported import ExportTable
from unisono.rpc.pending_calls import CallFuture, FlowControl, PendingCalls
from unisono.rpc.receiver import Receiver
from unisono.rpc.router import Router
from unisono.rpc.rref import OwnedValue, RRef, RRefContext
from unisono.rpc.server import Server
from unisono.rpc.termination import TerminationDetector
from unisono.rpc.thread_pool import Workers

__all__ = ["TIMEOUT_S", "Agent", "WorkerInfo"]

TIMEOUT_S = 60.0
"""Default timeout of a call, in seconds."""
_MOST_CALLS = 16384
_MOST_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Address of a rank for calls.

    Attributes:
        name: As passed to `init`.
        id: Its rank.
    """

    name: str
    id: int


class Agent:
    """One rank's part in remote calls. Created by `unisono.rpc.init`; its methods are thread-safe.

    Attributes:
        rank, size: This rank, and the number of ranks.
        name: Name of this rank for callers.
        infos: `WorkerInfo` of every rank.
    """

    rref_class: type[RRef[Any]] = RRef

    def __init__(
        self, comm: Communicator, name: str, timeout_s: float, trusted: bool, expose: Iterable[Any], workers: int
    ) -> None:
        self.exposed = ExportTable(trusted, expose)
        self.box, cards = comm.mailbox(name)
        self.rank, self.size, self.name, self.timeout = comm.rank, comm.size, name, timeout_s
        self.infos = [WorkerInfo(card, rank) for rank, card in enumerate(cards)]
        self._ranks: dict[Any, int] = {info.name: info.id for info in self.infos}
        if len(self._ranks) < self.size:
            self.box.close()
            twice = [name for name, count in Counter(cards).items() if count > 1]
            raise ValueError(f"several ranks passed the name {twice[0]!r} to rpc.init; each rank needs its own name")
        self._ranks.update({info.id: info.id for info in self.infos})
        self._ranks.update({info: info.id for info in self.infos})
        self.closed = False
        windows = [FlowControl(_MOST_CALLS, _MOST_BYTES) for _ in range(self.size)]
        self.calls = PendingCalls(windows, self.box.wake)
        self.caller = Client(self, windows)
        self.office = Router(self)
        self.references = RRefContext(self)
        self.contexts = Contexts(self)
        self.serving = Server(self)
        self.closing = TerminationDetector(self)
        self.nudge = self.box.wake
        thread = f"unisono rpc {name}"
        self.workers = Workers(thread, workers, self._adopt_thread)
        self.receiver = Receiver(
            self.box, self.office.dispatch, self.workers.run, self.office.clock, self._adopt_thread, thread
        )
        register(self)
        close_at_exit(self)
        # The communicator may outlive a closed agent for long, and must not keep its objects alive.
        comm.after_close(partial(_close, weakref.ref(self)))
        # Last, because other ranks may be calling already.
        self.receiver.start()

    def _adopt_thread(self) -> None:
        set_agent(self)

    # -- calls ---------------------------------------------------------------------------------
    def rpc_sync(
        self, to: Any, func: Callable[..., Any], args: Any = (), kwargs: Any = None, timeout: Timeout | None = None
    ) -> Any:
        """See `unisono.rpc.rpc_sync`."""
        target, given = self.caller.target(func, args)
        return self.caller.call(self.rank_of(to), target, None, given, kwargs, timeout)

    def rpc_async(
        self, to: Any, func: Callable[..., Any], args: Any = (), kwargs: Any = None, timeout: Timeout | None = None
    ) -> CallFuture:
        """See `unisono.rpc.rpc_async`."""
        target, given = self.caller.target(func, args)
        return self.caller.start(self.rank_of(to), target, None, given, kwargs, timeout)

    def remote(
        self, to: Any, func: Callable[..., Any], args: Any = (), kwargs: Any = None, timeout: Timeout | None = None
    ) -> RRef[Any]:
        """See `unisono.rpc.remote`."""
        target, given = self.caller.target(func, args)
        return self.caller.make(self.rank_of(to), target, None, given, kwargs, timeout)

    def rank_of(self, to: Any) -> int:
        """Return the rank of a name, a rank or a `WorkerInfo`. Raises ValueError for anything else."""
        rank = self._ranks.get(to) if isinstance(to, Hashable) and not isinstance(to, bool) else None
        if rank is None:
            known = ", ".join(f"{info.name!r} ({info.id})" for info in self.infos[:16])
            raise ValueError(f"unknown rank {to!r}; known: {known}")
        return rank

    # -- life ----------------------------------------------------------------------------------
    def get_worker_info(self, name: Any = None) -> WorkerInfo:
        """Return the `WorkerInfo` of a name or rank; of this rank if None."""
        return self.infos[self.rank if name is None else self.rank_of(name)]

    def thread(self, target: Callable[..., object], *args: Any, **kwargs: Any) -> threading.Thread:
        """Start and return a daemon thread in which the functions of `unisono.rpc` act on this agent."""
        # Threads that a function starts belong to the call that it serves.
        context = copy_context()
        context.run(self._adopt_thread)
        thread = threading.Thread(
            target=lambda: context.run(target, *args, **kwargs), name=f"unisono rpc {self.name} thread", daemon=True
        )
        thread.start()
        return thread

    def wait_known(self, outcome: OwnedValue, timeout: Timeout | None) -> None:
        """Wait for an object of this rank that is being created."""
        limit, known = resolve_timeout(timeout, self.timeout), threading.Event()
        outcome.when_known(known.set)
        with self.workers.not_counted():
            if not known.wait(limit):
                raise CommTimeoutError(
                    f"waited {limit:.1f} s for an object that is still being created", waited_s=limit
                )

    def idle(self) -> bool:
        """Return whether no call is in progress, neither made nor served by this rank."""
        return not len(self.calls) and not len(self.serving)

    def alive(self) -> list[int]:
        """Ranks that still serve calls."""
        return [rank for rank in range(self.size) if rank not in self.office.gone and rank not in self.box.lost]

    def shutdown(self, graceful: bool = True, timeout: Timeout | None = None) -> None:
        """See `unisono.rpc.shutdown`."""
        if graceful and not self.closed:
            if self.serving.runs_here():
                raise CommError(
                    "rpc.shutdown waits for all calls to end, so a function that another rank called cannot call "
                    "it: its own call would never end. Call it from another thread of this rank"
                )
            self.closing.wait(timeout)
        self.close("it shut its agent down")

    def close(self, reason: str = "it shut its agent down") -> None:
        """Stop serving immediately; pending calls fail on both sides. Idempotent."""
        if self.closed:
            return
        self.closed = True
        unregister(self)
        if not self.closing.over:
            self.office.announce_exit(reason)
        self.receiver.close()
        self.workers.close()
        self.box.close()
        self.caller.end_all()
        self.closing.finish()

    def on_process_exit(self, error: BaseException | None) -> None:
        """Close the agent: the process ends."""
        self.close("its process ended" if error is None else f"it failed: {type(error).__name__}: {error}")

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.shutdown(graceful=error is None)

    def __repr__(self) -> str:
        return f"<rpc agent {self.name!r}, rank {self.rank} of {self.size}>"


def _close(known: weakref.ref[Agent]) -> None:
    agent = known()
    if agent is not None:
        agent.close("it closed its communicator")
