"""Transport between ranks that are threads of one process, with sends that are never buffered."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from unisono.core import clock
from unisono.core.call import NOTHING_SENT, Call, Fingerprint, explain
from unisono.core.control import ControlPlane
from unisono.core.failure import left_error
from unisono.core.group import Group
from unisono.core.staging import ACCELERATORS
from unisono.core.transport import Options, Transport
from unisono.core.types import Message, Send, Work
from unisono.core.work import Completion, CountdownWork, elements, missing_ranks_error, size_error
from unisono.errors import CommTimeoutError, MismatchError

__all__ = ["TRANSPORT", "InFlightMessage", "MessageQueue", "ThreadTransport"]

_Key = tuple[str, int, int, int]
_Rank = tuple[str, int]
_Attendance = tuple[Fingerprint, Completion]
"""A rank's call, and the `Completion` with which the rank waits until all ranks have made their calls."""


class MessageQueue:
    """Unmatched messages of all groups of one job, shared by all ranks."""

    def __init__(self) -> None:
        self.lock: threading.Lock = threading.Lock()
        self.waiting: defaultdict[_Key, deque[tuple[Message, CountdownWork]]] = defaultdict(deque)
        # For each rank of a group, the keys of its messages in `waiting`, in order, so that no search is needed to find
        # the messages of a rank that leaves.
        self._keys: defaultdict[_Rank, dict[_Key, None]] = defaultdict(dict)
        self.broken: dict[str, dict[int, BaseException]] = {}
        self.left: defaultdict[str, set[int]] = defaultdict(set)
        # Ranks that make no more calls, but whose earlier messages may still be received.
        self.done: defaultdict[str, set[int]] = defaultdict(set)
        # For each group and call number, the ranks that have reached the call.
        self.meetings: defaultdict[str, dict[int, dict[int, _Attendance]]] = defaultdict(dict)

    def offer(
        self, group: str, rank: int, batch: Sequence[Message], work: CountdownWork
    ) -> list[tuple[Message, Message, CountdownWork]]:
        """Match a rank's messages with waiting messages; return the pairs, and queue the unmatched messages.

        The caller must hold the lock.
        """
        matched: list[tuple[Message, Message, CountdownWork]] = []
        for message in batch:
            ends = (rank, message.peer) if isinstance(message, Send) else (message.peer, rank)
            key = (group, *ends, message.tag)
            queue = self.waiting[key]
            if queue and type(queue[0][0]) is not type(message):
                matched.append((message, *queue.popleft()))
                if not queue:
                    self.remove(key)
                continue
            if not queue:
                for end in ends:
                    self._keys[group, end][key] = None
            queue.append((message, work))
            if message.peer in self.done.get(group, ()):
                work.complete(left_error(message.peer))
        return matched

    def remove(self, key: _Key) -> deque[tuple[Message, CountdownWork]]:
        """Remove and return the waiting messages with this key. The caller must hold the lock."""
        for rank in {key[1], key[2]}:
            keys = self._keys[key[0], rank]
            del keys[key]
            if not keys:
                del self._keys[key[0], rank]
        return self.waiting.pop(key)

    def leave(self, group: str, rank: int, size: int) -> None:
        """Record that a rank has left a group; the last to leave removes the group. The caller must hold the lock."""
        self.left[group].add(rank)
        if len(self.left[group]) == size:
            del self.left[group]
            self.done.pop(group, None)
            self.broken.pop(group, None)
            self.meetings.pop(group, None)

    def forget(self, group: str, rank: int, *, others: bool = False) -> list[CountdownWork]:
        """Remove the waiting messages that a rank posted; with `others`, its peers' messages to or from it instead.

        Returns the `CountdownWork`s of the removed messages.
        """
        with self.lock:
            found = []
            for key in list(self._keys.get((group, rank), ())):
                sends = isinstance(self.waiting[key][0][0], Send)
                if ((key[1] == rank) == sends) != others:
                    found += [work for _, work in self.remove(key)]
            return found


@dataclass(slots=True, eq=False)
class InFlightMessage:
    """A matched send and receive.

    Attributes:
        source, target: The ranks.
        sent, expected: The matched send and receive.
        send, recv: `CountdownWork`s to which the send and the receive belong.
        given, taken: Tensor to copy from, and tensor to copy to.
    """

    source: int
    sent: Message
    send: CountdownWork
    target: int
    expected: Message
    recv: CountdownWork
    given: torch.Tensor = field(init=False)
    taken: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.given = self.sent.tensor
        self.taken = self.expected.tensor

    def deliver(self) -> None:
        """Copy the content, and complete the send and the receive; both fail if the copy fails."""
        given = self.given
        taken = self.taken
        if given.dtype != taken.dtype or given.numel() != taken.numel():
            sent, expected = (elements(t.numel(), str(t.dtype)) for t in (given, taken))
            for work, peer in ((self.send, self.target), (self.recv, self.source)):
                work.complete(size_error(self.source, sent, self.target, expected, self.sent.tag, peer))
            return
        # The sender's or the receiver's thread may run this copy, so take the inference mode from the receiver's
        # tensor.
        try:
            with torch.inference_mode(taken.is_inference()), torch.no_grad():
                taken.copy_(given)
        except Exception as error:
            # The copy has failed, for example for lack of memory. Fail both the send and the receive, because the
            # message will never arrive.
            self.send.complete(error)
            self.recv.complete(error)
            return
        self.send.arrived(self.sent)
        self.recv.arrived(self.expected)


class ThreadTransport(Transport):
    """Transport between threads. A message is one copy from the sender's tensor to the receiver's.

    A send completes only when it is received, so a program that does not deadlock here never depends on buffering.
    Cost: about 20 us per message, plus the copy.
    """

    in_process = True
    any_source = checks = True
    devices: frozenset[str] = ACCELERATORS | {"cpu"}
    host_staged = ACCELERATORS
    latency_s: float = 20e-6
    second_per_byte: float = 1e-10
    _work: type[CountdownWork] = CountdownWork
    _deliver: Callable[[InFlightMessage], None] = staticmethod(InFlightMessage.deliver)

    def __init__(self, group: Group, queue: MessageQueue, timeout_s: float) -> None:
        self.group = group
        self._queue = queue
        self._timeout_s = timeout_s

    @classmethod
    def connect(cls, group: Group, control: ControlPlane, options: Options) -> ThreadTransport:
        return cls(group, control.share("thread/mail", MessageQueue), options.timeout_s)

    def post(self, batch: Sequence[Message]) -> Work:
        work = self._work(self._timeout_s, batch)
        queue = self._queue
        group = self.group.name
        rank = self.group.rank
        with queue.lock:
            broken = queue.broken.get(group, {}).get(rank)
            if broken is not None:
                work.complete(broken)
                return work
            matched = queue.offer(group, rank, batch, work)
        # Copy without holding the lock, so that different pairs of ranks can copy at the same time.
        for mine, theirs, their_work in matched:
            if isinstance(mine, Send):
                self._deliver(InFlightMessage(rank, mine, work, mine.peer, theirs, their_work))
            else:
                self._deliver(InFlightMessage(mine.peer, theirs, their_work, rank, mine, work))
        return work

    def iprobe(self, peer: int, tag: int) -> bool:
        with self._queue.lock:
            waiting = self._queue.waiting.get((self.group.name, peer, self.rank, tag))
            if waiting is None and peer in self._queue.left.get(self.group.name, ()):
                raise left_error(peer)
            return waiting is not None and isinstance(waiting[0][0], Send)

    def compare(self, call: Call, deadline: float) -> None:
        if not (self.checks and call.checked):
            return
        number = call.fingerprint.call
        size = self.group.size
        queue = self._queue
        arrived = Completion(0.0)
        with queue.lock:
            broken = queue.broken.get(self.group.name, {}).get(self.rank)
            if broken is not None:
                raise broken
            meetings = queue.meetings[self.group.name]
            meeting = meetings.setdefault(number, {})
            meeting[self.rank] = call.fingerprint, arrived
            gone = queue.done.get(self.group.name, set()) - meeting.keys()
            if len(meeting) == size:
                del meetings[number]
        if gone:
            raise left_error(min(gone))
        if len(meeting) == size:
            for _, waiting in meeting.values():
                waiting.complete()
        self._await(meeting, arrived, deadline)
        mine = call.fingerprint.compared()
        prints = [meeting[rank][0] for rank in range(size)]
        if any(other.compared() != mine for other in prints) or call.fingerprint.sends:
            problem = explain(prints)
            if problem:
                raise MismatchError(f"{problem}. {NOTHING_SENT}")

    def _await(self, meeting: dict[int, _Attendance], arrived: Completion, deadline: float) -> None:
        started = clock.now()
        try:
            arrived.wait(max(0.0, deadline - started))
        except CommTimeoutError:
            missing = [rank for rank in range(self.size) if rank not in meeting]
            if missing:
                raise missing_ranks_error(clock.now() - started, missing) from None

    def split(self, group: Group) -> ThreadTransport:
        return ThreadTransport(group, self._queue, self._timeout_s)

    def leave(self) -> None:
        """Fail all calls and messages that wait for this rank.

        Messages that this rank has already sent may still be received.
        """
        with self._queue.lock:
            self._queue.done[self.group.name].add(self.rank)
            meetings = self._queue.meetings.get(self.group.name, {}).values()
            waiting = [arrived for meeting in meetings if self.rank not in meeting for _, arrived in meeting.values()]
        for arrived in waiting:
            arrived.complete(left_error(self.rank))
        for batch in self._queue.forget(self.group.name, self.rank, others=True):
            batch.complete(left_error(self.rank))

    def close(self) -> None:
        """Leave the group; other ranks' current and later messages to or from this rank end with an error."""
        self.leave()
        group = self.group.name
        with self._queue.lock:
            self._queue.leave(group, self.rank, self.size)
        # Others may have posted messages since `leave`; they have failed, but are still queued.
        for batch in self._queue.forget(group, self.rank) + self._queue.forget(group, self.rank, others=True):
            batch.complete(left_error(self.rank))

    def abort(self, cause: BaseException) -> None:
        with self._queue.lock:
            self._queue.broken.setdefault(self.group.name, {}).setdefault(self.rank, cause)
            meetings = [meeting.get(self.rank) for meeting in self._queue.meetings.get(self.group.name, {}).values()]
        for attendance in meetings:
            if attendance is not None:
                attendance[1].complete(cause)
        for batch in self._queue.forget(self.group.name, self.rank):
            batch.complete(cause)


TRANSPORT = ThreadTransport
