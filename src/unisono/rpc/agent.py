"""One rank's agent: makes calls, serves other ranks' calls, and shuts down in an orderly way."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any

from unisono.communicator import Communicator
from unisono.control.process_exit import close_at_exit
from unisono.core import clock
from unisono.core.transport import Envelope, Mailbox
from unisono.core.types import Timeout
from unisono.core.work import positive_timeout, resolve_timeout
from unisono.errors import CommError, CommTimeoutError, PeerLostError
from unisono.rpc.autograd.engine import Contexts
from unisono.rpc.call_future import CallFuture
from unisono.rpc.channel import MessageChannel, control_message, words_of
from unisono.rpc.client import Client
from unisono.rpc.context import current_agent, find_agent, leave_agent, register, set_agent, unregister
from unisono.rpc.dispatcher import Dispatcher, Handler
from unisono.rpc.exported import ExportTable
from unisono.rpc.protocol import (
    ADD,
    ADD_ACK,
    CANCEL,
    CLOSE,
    CONFIRM,
    DISCARD,
    DROP,
    ERROR,
    EXIT,
    IDLE,
    RELEASE,
    REMOTE,
    REPLY,
    REQUEST,
    WorkerInfo,
)
from unisono.rpc.receiver import Receiver
from unisono.rpc.rref import RRef, RRefContext
from unisono.rpc.server import CallServer
from unisono.rpc.workers import Task, Workers

__all__ = ["TIMEOUT_S", "Agent", "TerminationDetector", "get_worker_info", "init", "shutdown"]

TIMEOUT_S = 60.0
"""Default timeout of a call, in seconds."""


class Agent:
    """A rank's endpoint for remote calls. Created by `unisono.rpc.init`; its methods are thread-safe.

    Args:
        comm: Communicator of the ranks; closing it also closes the agent.
        name: Name by which other ranks can address this rank.
        timeout_s: Default timeout of a call, in seconds.
        trusted: Whether peers may call any function that this process can import, and send pickled values.
        expose: Functions and classes to expose on this rank only.
        workers: Maximum number of functions that run concurrently on this rank.

    Attributes:
        rank, size: This rank, and the number of ranks.
        name: Name by which other ranks can address this rank.
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
        box, names = comm.mailbox(name)
        self.box: Mailbox = box
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.name = name
        self.infos: list[WorkerInfo] = [WorkerInfo(worker, rank) for rank, worker in enumerate(names)]
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            self.box.close()
            raise ValueError(f"several ranks passed the name {twice[0]!r} to rpc.init; each rank needs its own name")
        self.closed: bool = False
        self._adopt_thread = partial(set_agent, self)
        self.workers: Workers = Workers(f"unisono rpc {name}", workers, self._adopt_thread)
        self.dispatcher: Dispatcher = Dispatcher(self.box, self.workers)
        self.receiver: Receiver = Receiver(self.box, self.dispatcher, self.workers, self._due)
        self.channel: MessageChannel = MessageChannel(self, self.box, exposed, self.dispatcher, self.workers)
        self.references: RRefContext = RRefContext(
            self, self.box, self.channel.send_control, timeout_s, self.workers, self.rref_class
        )
        self.channel.references = self.references
        self.contexts: Contexts = Contexts(self.rank, self.channel.send_control)
        self.client: Client = Client(self, self.channel, self.dispatcher, self.workers, self.references, timeout_s)
        self.server: CallServer = CallServer(self.channel, self.references)
        self.termination: TerminationDetector = TerminationDetector(self.box, self.alive, self._counts)
        self.when_lost: list[Callable[[int], None]] = [self.contexts.lose]
        register(self)
        close_at_exit(self)
        # Use a weak reference: the communicator may outlive a closed agent, and must not keep the agent's objects
        # alive.
        comm.after_close(partial(_close, weakref.ref(self)))
        self.dispatcher.handlers.update(self._handlers())
        # Receive messages only now that the agent is complete, because other ranks may already have sent calls.
        self.receiver.start()

    # -- messages ------------------------------------------------------------------------------
    def _handlers(self) -> dict[int, Handler]:
        return {
            **dict.fromkeys((REQUEST, REMOTE), self.server.accept),
            **dict.fromkeys((REPLY, ERROR), self.client.replies.answered),
            **dict.fromkeys((ADD, ADD_ACK, DROP, RELEASE), self._count_references),
            **dict.fromkeys((IDLE, CONFIRM, CLOSE), self._advance_termination),
            CANCEL: lambda message: self.server.cancel(message.peer, words_of(message)[0]),
            EXIT: self._note_exit,
            DISCARD: lambda message: (partial(self.contexts.discard, words_of(message)[0]), True),
        }

    def _count_references(self, message: Envelope) -> tuple[Task, bool]:
        self.references.arrived(message.peer, message.head[0], words_of(message))
        return self.channel.empty_outbox, True

    def _advance_termination(self, message: Envelope) -> tuple[Task, bool]:
        return partial(self.termination.arrived, message.peer, message.head[0], words_of(message)), True

    def _note_exit(self, message: Envelope) -> None:
        error = PeerLostError(f"rank {message.peer} no longer serves calls: {words_of(message)[0]}", peer=message.peer)
        self.box.mark_lost(message.peer, error)

    def _due(self) -> tuple[float, list[Task]]:
        """Return a pair: when to call this method next (on the library's clock), and the tasks that are due now."""
        calls = self.client.calls
        replies = self.client.replies
        tasks: list[Task] = [partial(replies.give_up, call, call.timeout_error()) for call in calls.timed_out()]
        tasks.extend(partial(self._lose, peer) for peer in self.dispatcher.newly_lost())
        if self.references.waiting:
            tasks.append(self.references.flush)
        return calls.next_due, tasks

    def _lose(self, peer: int) -> None:
        """Handle a lost rank."""
        self.client.replies.lose(peer)
        self.server.lose(peer)
        for outcome in self.references.lose(peer):
            error = PeerLostError(f"rank {peer} died before the object was created", peer=peer)
            outcome.settle(None, error)
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
            to, func, args, kwargs, timeout: As for `unisono.rpc.rpc_sync`.

        Returns: The function's result.
        """
        return self.client.call(*self.client.target(to, func, args), kwargs, timeout)

    def rpc_async(
        self, to: Any, func: Callable[..., Any], args: Any = (), kwargs: Any = None, timeout: Timeout | None = None
    ) -> CallFuture:
        """Call a function on another rank without waiting; see `unisono.rpc.rpc_async`.

        Args:
            to, func, args, kwargs, timeout: As for `unisono.rpc.rpc_sync`.

        Returns: A future for the result.
        """
        return self.client.start(*self.client.target(to, func, args), kwargs, timeout)

    def remote(
        self, to: Any, func: Callable[..., Any], args: Any = (), kwargs: Any = None, timeout: Timeout | None = None
    ) -> RRef[Any]:
        """Call a function on another rank, and keep the result there; see `unisono.rpc.remote`.

        Args:
            to, func, args, kwargs, timeout: As for `unisono.rpc.rpc_sync`.

        Returns: A reference to the result. The call does not wait until the result exists.
        """
        return self.client.make(*self.client.target(to, func, args), kwargs, timeout)

    def rank_of(self, to: Any) -> int:
        """Return the number of a rank.

        Args:
            to: A rank's name or number, or its `WorkerInfo`.

        Raises:
            ValueError: `to` does not identify a rank.
        """
        return self.client.rank_of(to)

    # -- lifetime ------------------------------------------------------------------------------
    def get_worker_info(self, name: Any = None) -> WorkerInfo:
        """Return the name and number of a rank.

        Args:
            name: A rank's name or number, or its `WorkerInfo`; this rank if None.
        """
        return self.infos[self.rank if name is None else self.client.rank_of(name)]

    def thread(self, target: Callable[..., object], *args: Any, **kwargs: Any) -> threading.Thread:
        """Start a daemon thread in which the functions of `unisono.rpc` use this agent.

        Args:
            target: Function to run in the thread.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Returns: The started thread.
        """
        # Copy the context variables: a thread that a remote function starts belongs to the same call as that function.
        context = copy_context()
        context.run(self._adopt_thread)
        thread = threading.Thread(
            target=lambda: context.run(target, *args, **kwargs), name=f"unisono rpc {self.name} thread", daemon=True
        )
        thread.start()
        return thread

    def idle(self) -> bool:
        """Return whether this rank is neither making nor serving a call."""
        return not len(self.client.calls) and not len(self.server)

    def _counts(self) -> tuple[list[int], list[int]] | None:
        """Return two lists with one number per rank: calls sent to that rank, and calls served for it.

        Returns None while a call is in progress.
        """
        if not self.idle():
            return None
        ranks = range(self.size)
        return [self.client.calls.sent[rank] for rank in ranks], [self.server.served[rank] for rank in ranks]

    def alive(self) -> list[int]:
        """Return the ranks that still serve calls, in ascending order; this rank is one of them."""
        return [rank for rank in range(self.size) if rank not in self.dispatcher.ended and rank not in self.box.lost]

    def shutdown(self, graceful: bool = True, timeout: Timeout | None = None) -> None:
        """Shut this agent down; see `unisono.rpc.shutdown`.

        Args:
            graceful, timeout: As for `unisono.rpc.shutdown`.

        Raises:
            CommTimeoutError: Not all ranks were done in time; this agent keeps running.
            CommError: `shutdown` was called inside a function that another rank called; that rank would wait forever.
        """
        if graceful and not self.closed:
            if self.server.runs_here():
                raise CommError(
                    "rpc.shutdown waits for all calls to end, so a function that another rank called cannot call "
                    "it: its own call would never end. Call it from another thread of this rank"
                )
            self.client.replies.leave_callback()
            with self.workers.not_counted():
                self.termination.wait(timeout)
        self.close("it shut its agent down")

    def close(self, reason: str = "it shut its agent down") -> None:
        """Stop serving immediately; pending calls to and from this rank fail. Idempotent.

        Args:
            reason: Text that says why this agent was closed, for the errors raised on other ranks.
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
        """Close the agent when the process exits.

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

    After `init`, the functions of this package use this rank's agent: in this thread, in functions called by other
    ranks, and in every thread if the process has only one agent. The agent uses its own message channel, so the
    communicator remains usable for collectives, and a broken communicator does not affect calls. A dead rank affects
    only the ranks that call it.

    Args:
        comm: Any communicator, including one made by `split`; closing the communicator also closes the agent.
        name: Name by which other ranks can address this rank, instead of by its number; if None, "rank0", "rank1", ...
        timeout: Default timeout of every call: seconds or a `timedelta`.
        trusted: Whether peers may call any function that this process can import, and send pickled values, which lets
            them run arbitrary code. If False, only exposed functions can be called.
        expose: Functions and classes to expose on this rank only.
        workers: Maximum number of functions that run concurrently on this rank, not counting functions that wait for
            other ranks.

    Returns: This rank's agent, whose methods match the functions of this package.

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
    agent = current_agent()
    return agent.infos[agent.rank if name is None else agent.client.rank_of(name)]


def shutdown(graceful: bool = True, timeout: Timeout | None = None) -> None:
    """Shut down this rank's agent, if there is one.

    Args:
        graceful: Whether to keep serving until every living rank has called `shutdown` and all calls are done,
            including the callbacks of their futures. If False, shut down immediately; pending calls fail.
        timeout: Limit (seconds or a `timedelta`) on the wait for the other living ranks; no limit if None.

    Raises:
        CommTimeoutError: Not all ranks were done in time; this agent keeps running.
        CommError: `shutdown` was called inside a function that another rank called; that rank would wait forever.
    """
    agent = find_agent()
    if agent is not None:
        agent.shutdown(graceful, timeout)
        leave_agent(agent)


_Report = tuple[list[int], list[int]]
_SEND_S = 0.5
_SHORTEST_S = 0.01
_LONGEST_S = 0.2


class TerminationDetector:
    """Distributed termination detection on one rank.

    Args:
        box: Mailbox of this rank.
        alive: Function that returns the ranks that still serve calls.
        counts: Function that returns two lists with one number per rank: calls sent to that rank, and calls served for
            it. Returns None while a call is in progress.

    Attributes:
        over: Whether all ranks have agreed to shut down.
    """

    def __init__(self, box: Mailbox, alive: Callable[[], list[int]], counts: Callable[[], _Report | None]) -> None:
        self._box = box
        self._rank = box.group.rank
        self._alive = alive
        self._counts = counts
        self._lock = threading.Lock()
        self._requested = False
        self._ended = threading.Event()
        self.over: bool = False
        self._wave = 0
        self._last_report: tuple[int, int, _Report] | None = None
        self._reports: dict[int, dict[int, _Report]] = {}

    def wait(self, timeout: Timeout | None) -> None:
        """Wait until all ranks are done. On a timeout, raises CommTimeoutError, and all agents keep running."""
        self._requested = True
        self._query_ranks()
        limit_s = None if timeout is None else resolve_timeout(timeout)
        limit = None if limit_s is None else clock.now() + limit_s
        pause = _SHORTEST_S
        while not self._ended.wait(pause if limit is None else min(pause, max(limit - clock.now(), 0))):
            # Poll periodically instead of after each call, because a rank that only serves calls waits here all the
            # time.
            pause = _SHORTEST_S if self.look() else min(2 * pause, _LONGEST_S)
            if limit is not None and clock.now() >= limit:
                self._requested = False
                raise CommTimeoutError(
                    f"waited {limit_s:.1f} s in rpc.shutdown for all ranks to finish their calls"
                    f"{self._missing()}. Did every rank call shutdown?",
                    waited_s=limit_s,
                )

    def _missing(self) -> str:
        """Describe the ranks that have not reported that they are done, as far as this rank knows."""
        rank = self._rank
        alive = self._alive()
        if self._counts() is None:
            return "; calls of this rank, or of others to it, are still running"
        if rank != min(alive):
            return f", and rank {min(alive)}, which decides, has not reported that they have"
        with self._lock:
            reports = self._reports.get(self._wave, {})
        late = [str(other) for other in alive if other not in reports]
        return f"; no report yet from rank {', '.join(late)}" if late else ""

    def _query_ranks(self) -> None:
        """Query all ranks if this rank is the coordinator, which is the living rank with the lowest number."""
        alive = self._alive()
        if self._rank == min(alive):
            with self._lock:
                self._wave += 1
                self._reports.clear()
                wave = self._wave
            self._send(alive, CONFIRM, wave)
        else:
            self.look()

    def finish(self) -> None:
        """Wake the waiting threads, because the agent is closed."""
        self._ended.set()

    def look(self) -> bool:
        """If this rank is idle, report this to the coordinator; return whether the report was new."""
        report = self._counts() if self._requested and not self._ended.is_set() else None
        if report is None:
            return False
        coordinator = min(self._alive())
        with self._lock:
            wave = self._wave
            new = (coordinator, wave, report) != self._last_report
            self._last_report = (coordinator, wave, report)
        if new or coordinator == self._rank:
            self._send([coordinator], IDLE, wave, *report)
        return new

    def arrived(self, peer: int, kind: int, words: tuple[Any, ...]) -> None:
        """Handle a termination message."""
        if kind == IDLE:
            self._record(peer, words[0], (words[1], words[2]))
        elif kind == CONFIRM:
            with self._lock:
                self._wave = max(self._wave, words[0])
                self._last_report = None
            self.look()
        elif kind == CLOSE:
            self.over = True
            self._ended.set()

    def _record(self, peer: int, wave: int, report: _Report) -> None:
        """As the coordinator, handle a rank's report."""
        alive = self._alive()
        with self._lock:
            peers, kind, wave = self._judged(peer, wave, report, alive)
        self._send(peers, kind, wave)

    def _judged(self, peer: int, wave: int, report: _Report, alive: list[int]) -> tuple[list[int], int, int]:
        """Return which ranks get a message, whether it is CONFIRM or CLOSE, and its wave (round of reports).

        No rank gets a message while reports of this wave are missing, or while calls are in flight.
        """
        if wave < self._wave:
            # The report is stale. Query its sender again, and let this rank look again at its own state, too.
            return [peer, self._rank], CONFIRM, self._wave
        self._wave = wave
        self._reports.setdefault(wave, {})[peer] = report
        now = self._reports[wave]
        before = self._reports.get(wave - 1)
        # Every rank in `alive` has reported, and every call between these ranks has been served.
        even = all(other in now for other in alive) and all(now[a][0][b] == now[b][1][a] for a in alive for b in alive)
        if not even:
            return [], CONFIRM, wave
        if before is not None and all(before.get(other) == now[other] for other in alive):
            return alive, CLOSE, wave
        self._wave += 1
        self._reports = {wave: now}
        return alive, CONFIRM, self._wave

    def _send(self, peers: Sequence[int], kind: int, *words: Any) -> None:
        """Send a message to some ranks. This rank handles its own message last, because CLOSE lets the agent close."""
        for peer in peers:
            if peer != self._rank:
                # Ignore errors: the peer is gone, or is about to be declared lost. The peer's answer is not needed, and
                # if the peer was the coordinator, another rank takes over.
                with suppress(CommError):
                    self._box.send(peer, control_message(kind, words), (), _SEND_S)
        if self._rank in peers:
            self.arrived(self._rank, kind, words)
