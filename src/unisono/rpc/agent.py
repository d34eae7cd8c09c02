"""One rank's agent: makes calls, serves those of other ranks, and shuts down in order."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextvars import copy_context
from functools import partial
from typing import Any

from unisono.communicator import Communicator
from unisono.control.process_exit import close_at_exit
from unisono.core.transport import Envelope
from unisono.core.types import Timeout
from unisono.errors import CommError, PeerLostError
from unisono.rpc import protocol
from unisono.rpc.channel import Channel, words_of
from unisono.rpc.client import Client
from unisono.rpc.context import register, set_agent, unregister
from unisono.rpc.exported import ExportTable
from unisono.rpc.pending_calls import CallFuture
from unisono.rpc.protocol import WorkerInfo
from unisono.rpc.receiver import Handler, Receiver, Task
from unisono.rpc.rref import RRef
from unisono.rpc.rref_context import RRefContext
from unisono.rpc.server import Server
from unisono.rpc.termination import TerminationDetector
from unisono.rpc.thread_pool import Workers

__all__ = ["TIMEOUT_S", "Agent", "extensions"]

TIMEOUT_S = 60.0
"""Default timeout of a call, in seconds."""

extensions: list[Callable[[Agent], None]] = []
"""Called with each new agent before it receives: autograd, which the agent does not import, registers here."""


class Agent:
    """One rank's part in remote calls. Created by `unisono.rpc.init`; its methods are thread-safe.

    Args:
        comm: Communicator of the ranks; closing it ends the agent.
        name: Name of this rank for callers.
        timeout_s: Default timeout of a call, in seconds.
        trusted: Whether peers may call anything importable here and send pickled values.
        expose: Functions and classes to expose on this rank only.
        workers: Maximum number of functions running concurrently here.

    Attributes:
        rank, size: This rank, and the number of ranks.
        name: Name of this rank for callers.
        infos: `WorkerInfo` of every rank.

    Example:
        >>> def program(comm):
        ...     with un.rpc.init(comm, expose=[torch.add]) as agent:
        ...         peer = (agent.rank + 1) % agent.size
        ...         future = agent.rpc_async(agent.rank_of(f"rank{peer}"), torch.add, (torch.ones(1), 2))
        ...         return agent.alive(), future.wait().item(), agent.idle()
        >>> un.launch(program, 1, "thread")
        [([0], 3.0, True)]
    """

    rref_class: type[RRef[Any]] = RRef

    def __init__(
        self, comm: Communicator, name: str, timeout_s: float, trusted: bool, expose: Iterable[Any], workers: int
    ) -> None:
        exposed = ExportTable(trusted, expose)
        self.box, names = comm.mailbox(name)
        self.rank, self.size, self.name = comm.rank, comm.size, name
        self.infos = [WorkerInfo(worker, rank) for rank, worker in enumerate(names)]
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            self.box.close()
            raise ValueError(f"several ranks passed the name {twice[0]!r} to rpc.init; each rank needs its own name")
        self.closed = False
        thread, self._adopt_thread = f"unisono rpc {name}", partial(set_agent, self)
        self.workers = Workers(thread, workers, self._adopt_thread)
        self.receiver = Receiver(self.box, self.workers, self._clock, self._adopt_thread, thread)
        self.channel = Channel(self.box, exposed, self.receiver, self.workers.run)
        wait = self.workers.not_counted
        self.references = RRefContext(self.channel, self.infos, timeout_s, wait, self.rref_class)
        self.client = Client(self.channel, self.receiver, self.references, self.infos, timeout_s, wait)
        self.server = Server(self.channel, self.references)
        self.termination = TerminationDetector(self.box, self.alive, self._counts)
        self.channel.references, self.references.client = self.references, self.client
        self.receiver.handlers.update(self._handlers())
        self.contexts: Any = None
        self.when_lost: list[Callable[[int], None]] = []
        for extend in extensions:
            extend(self)
        register(self)
        close_at_exit(self)
        # The communicator may outlive a closed agent for long, and must not keep its objects alive.
        comm.after_close(partial(_close, weakref.ref(self)))
        # Last, because other ranks may be calling already.
        self.receiver.start()

    # -- messages ------------------------------------------------------------------------------
    def _handlers(self) -> dict[int, Handler]:
        counts = (protocol.ADD, protocol.ADD_ACK, protocol.DROP, protocol.RELEASE)
        ends = (protocol.IDLE, protocol.CONFIRM, protocol.CLOSE)
        return {
            **dict.fromkeys((protocol.REQUEST, protocol.REMOTE), self.server.accept),
            **dict.fromkeys((protocol.REPLY, protocol.ERROR), self.client.answered),
            **dict.fromkeys(counts, self._count_references),
            **dict.fromkeys(ends, self._advance_termination),
            protocol.CANCEL: lambda message: self.server.cancel(message.peer, words_of(message)[0]),
            protocol.EXIT: self._note_exit,
        }

    def _count_references(self, message: Envelope) -> tuple[Task, bool]:
        self.references.arrived(message.peer, message.head[0], words_of(message))
        return self.channel.empty_outbox, True

    def _advance_termination(self, message: Envelope) -> tuple[Task, bool]:
        return partial(self.termination.arrived, message.peer, message.head[0], words_of(message)), True

    def _note_exit(self, message: Envelope) -> None:
        error = PeerLostError(f"rank {message.peer} no longer serves calls: {words_of(message)[0]}", peer=message.peer)
        self.box.mark_lost(message.peer, error)

    def _clock(self) -> tuple[float, list[Task]]:
        """Return when to check the clock next, and the tasks that are due now."""
        calls = self.client.calls
        tasks: list[Task] = [partial(calls.give_up, call, call.late()) for call in calls.late()]
        for peer in self.box.lost.keys() - self.receiver.ended:
            self.receiver.ended.add(peer)
            tasks.append(partial(self._lose, peer))
        if self.references.waiting:
            tasks.append(self.references.flush)
        return calls.next_due, tasks

    def _lose(self, peer: int) -> None:
        """Handle a lost rank."""
        self.client.calls.fail(peer, lambda: self.box.lost[peer])
        self.server.lose(peer)
        self.references.lose(peer, PeerLostError(f"rank {peer} died before the object was created", peer=peer))
        for action in self.when_lost:
            action(peer)
        self.channel.empty_outbox()
        self.termination.look()

    # -- calls ---------------------------------------------------------------------------------
    def rpc_sync(
        self, to: Any, func: Callable[..., Any], args: Any = (), kwargs: Any = None, timeout: Timeout | None = None
    ) -> Any:
        """Call a function on another rank, and return its result; see `unisono.rpc.rpc_sync`.

        Args:
            to, func, args, kwargs, timeout: As of `unisono.rpc.rpc_sync`.

        Returns: What the function returned.
        """
        return self.client.call(*self.client.target(to, func, args), kwargs, timeout)

    def rpc_async(
        self, to: Any, func: Callable[..., Any], args: Any = (), kwargs: Any = None, timeout: Timeout | None = None
    ) -> CallFuture:
        """Call a function on another rank without waiting; see `unisono.rpc.rpc_async`.

        Args:
            to, func, args, kwargs, timeout: As of `unisono.rpc.rpc_sync`.

        Returns: The future of the result.
        """
        return self.client.start(*self.client.target(to, func, args), kwargs, timeout)

    def remote(
        self, to: Any, func: Callable[..., Any], args: Any = (), kwargs: Any = None, timeout: Timeout | None = None
    ) -> RRef[Any]:
        """Call a function on another rank, and keep the result there; see `unisono.rpc.remote`.

        Args:
            to, func, args, kwargs, timeout: As of `unisono.rpc.rpc_sync`.

        Returns: A reference to the result, immediately.
        """
        return self.client.make(*self.client.target(to, func, args), kwargs, timeout)

    def rank_of(self, to: Any) -> int:
        """Return the number of a rank.

        Args:
            to: A rank's name or number, or its `WorkerInfo`.

        Raises:
            ValueError: There is no such rank.
        """
        return self.client.rank_of(to)

    # -- life ----------------------------------------------------------------------------------
    def get_worker_info(self, name: Any = None) -> WorkerInfo:
        """Return the name and number of a rank.

        Args:
            name: A rank's name or number, or its `WorkerInfo`; this rank if None.
        """
        return self.infos[self.rank if name is None else self.client.rank_of(name)]

    def thread(self, target: Callable[..., object], *args: Any, **kwargs: Any) -> threading.Thread:
        """Start a daemon thread in which the functions of `unisono.rpc` act on this agent.

        Args:
            target: Function to run in the thread.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Returns: The started thread.
        """
        # Threads that a function starts belong to the call that it serves.
        context = copy_context()
        context.run(self._adopt_thread)
        thread = threading.Thread(
            target=lambda: context.run(target, *args, **kwargs), name=f"unisono rpc {self.name} thread", daemon=True
        )
        thread.start()
        return thread

    def idle(self) -> bool:
        """Return whether no call is in progress, neither made nor served by this rank."""
        return not len(self.client.calls) and not len(self.server)

    def _counts(self) -> tuple[list[int], list[int]] | None:
        """Return the numbers of calls sent to and served for each rank; None while a call is in progress."""
        if not self.idle():
            return None
        ranks = range(self.size)
        return [self.client.calls.sent[rank] for rank in ranks], [self.server.served[rank] for rank in ranks]

    def alive(self) -> list[int]:
        """Return the ranks that still serve calls, in ascending order; this rank is one of them."""
        return [rank for rank in range(self.size) if rank not in self.receiver.ended and rank not in self.box.lost]

    def shutdown(self, graceful: bool = True, timeout: Timeout | None = None) -> None:
        """End this agent; see `unisono.rpc.shutdown`.

        Args:
            graceful, timeout: As of `unisono.rpc.shutdown`.

        Raises:
            CommTimeoutError: Not all ranks were done in time; this agent keeps running.
            CommError: Called from a function that another rank called; that rank's call would never end.
        """
        if graceful and not self.closed:
            if self.server.runs_here():
                raise CommError(
                    "rpc.shutdown waits for all calls to end, so a function that another rank called cannot call "
                    "it: its own call would never end. Call it from another thread of this rank"
                )
            self.client.calls.leave_callback()
            with self.workers.not_counted():
                self.termination.wait(timeout)
        self.close("it shut its agent down")

    def close(self, reason: str = "it shut its agent down") -> None:
        """Stop serving immediately; pending calls fail on both sides. Idempotent.

        Args:
            reason: Text for the errors of other ranks.
        """
        if self.closed:
            return
        self.closed = True
        unregister(self)
        if not self.termination.over:
            self.channel.announce_exit(self.alive(), reason)
        self.receiver.close()
        self.workers.close()
        self.box.close()
        self.client.close()
        self.termination.finish()

    def on_process_exit(self, error: BaseException | None) -> None:
        """Close the agent: the process ends.

        Args:
            error: Exception that ends the process; None if it ends normally.
        """
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
