"""Ranks as threads of this process: real numerics, no processes, and sends that never buffer."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence

from unisono.control import Control
from unisono.errors import PeerLostError
from unisono.group import Group
from unisono.transport import Options, Transport
from unisono.types import Message, Send, Work
from unisono.work import Countdown, elements, misfit

__all__ = ["TRANSPORT", "ThreadTransport"]

_Key = tuple[str, int, int, int]


class _Mail:
    """Messages of all groups of one job that wait for their counterpart. Shared by all ranks."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: defaultdict[_Key, deque[tuple[Message, Countdown]]] = defaultdict(deque)
        self.broken: dict[tuple[str, int], BaseException] = {}
        self.left: set[tuple[str, int]] = set()

    def offer(self, key: _Key, message: Message, batch: Countdown) -> tuple[Message, Countdown] | None:
        """The counterpart that already waits, or None after joining the queue. Call with the lock held."""
        queue = self.waiting[key]
        if queue and type(queue[0][0]) is not type(message):
            found = queue.popleft()
            if not queue:
                del self.waiting[key]
            return found
        queue.append((message, batch))
        return None

    def forget(self, group: str, rank: int) -> list[Countdown]:
        """Remove all that a rank has waiting in a group, and return it."""
        with self.lock:
            found = []
            for key in [k for k in self.waiting if k[0] == group and rank in k[1:3]]:
                source, sends = key[1], isinstance(self.waiting[key][0][0], Send)
                if (source == rank) == sends:
                    found += [batch for _, batch in self.waiting.pop(key)]
            return found


class ThreadTransport(Transport):
    """Ranks are threads; a message is one copy from the sender's tensor into the receiver's.

    A send completes only when it is received, so a program that is safe here needs no buffering
    anywhere. Cost: about 20 us a message, then the speed of memory.
    """

    in_process = True
    devices = frozenset({"cpu", "cuda"})
    latency_s = 20e-6
    second_per_byte = 1e-10

    def __init__(self, group: Group, mail: _Mail, timeout_s: float) -> None:
        self.group, self._mail, self._timeout_s = group, mail, timeout_s

    @classmethod
    def connect(cls, group: Group, control: Control, options: Options) -> ThreadTransport:
        return cls(group, control.share("thread/mail", _Mail), options.timeout_s)

    def post(self, batch: Sequence[Message]) -> Work:
        work, matched = Countdown(self._timeout_s, batch), []
        with self._mail.lock:
            broken = self._mail.broken.get((self.group.name, self.rank))
            if broken is not None:
                work.complete(broken)
                return work
            for message in batch:
                ends = (self.rank, message.peer) if isinstance(message, Send) else (message.peer, self.rank)
                other = self._mail.offer((self.group.name, *ends, message.tag), message, work)
                if other is not None:
                    matched.append((message, *other))
                elif (self.group.name, message.peer) in self._mail.left:
                    work.complete(_gone(message.peer))
        # Copies are made outside the lock, so that pairs of ranks do not wait for each other.
        for message, other_message, other_work in matched:
            self._deliver(message, work, other_message, other_work)
        return work

    def _deliver(self, mine: Message, my_work: Countdown, other: Message, other_work: Countdown) -> None:
        source, target = (mine.tensor, other.tensor) if isinstance(mine, Send) else (other.tensor, mine.tensor)
        if source.dtype != target.dtype or source.numel() != target.numel():
            sender, receiver = (self.rank, mine.peer) if isinstance(mine, Send) else (mine.peer, self.rank)
            sent, expected = (elements(t.numel(), str(t.dtype)) for t in (source, target))
            for work, peer in ((my_work, mine.peer), (other_work, self.rank)):
                work.complete(misfit(sender, sent, receiver, expected, mine.tag, peer))
            return
        target.copy_(source)
        my_work.arrived(mine)
        other_work.arrived(other)

    def split(self, group: Group) -> ThreadTransport:
        return ThreadTransport(group, self._mail, self._timeout_s)

    def close(self) -> None:
        """Whoever still waits for this rank, or comes to, is told that it has left."""
        with self._mail.lock:
            self._mail.left.add((self.group.name, self.rank))
            forsaken = [item for key in self._keys() for item in self._mail.waiting.pop(key)]
        for _, batch in forsaken:
            batch.complete(_gone(self.rank))

    def _keys(self) -> list[_Key]:
        """Where messages from or to this rank wait. Call with the lock held."""
        return [key for key in self._mail.waiting if key[0] == self.group.name and self.rank in key[1:3]]

    def abort(self, cause: BaseException) -> None:
        with self._mail.lock:
            self._mail.broken.setdefault((self.group.name, self.rank), cause)
        for batch in self._mail.forget(self.group.name, self.rank):
            batch.complete(cause)


def _gone(rank: int) -> PeerLostError:
    return PeerLostError(f"rank {rank} has left (it closed the communicator)", peer=rank)


TRANSPORT = ThreadTransport
