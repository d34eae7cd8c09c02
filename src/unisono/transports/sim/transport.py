"""Ranks in virtual time: a seed determines which rank runs next, and a network model determines message timing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import NoReturn

from unisono.control.simulated import SimulatedControl
from unisono.core.control import ControlPlane
from unisono.core.group import Group
from unisono.core.transport import Options
from unisono.core.types import Message, Send, Timeout, Work
from unisono.core.work import CountdownWork, describe, format_bytes
from unisono.errors import ClosedError, PeerLostError, UnavailableError
from unisono.simulation import EndedError, TaskScheduler, here, waiting
from unisono.transports.thread import InFlightMessage, MessageQueue, ThreadTransport

__all__ = ["TRANSPORT", "Link", "SimNetwork", "SimTransport"]


class _NetworkQueue(MessageQueue):
    """Unmatched messages and messages in flight. Shared by all ranks."""

    def __init__(self, network: SimNetwork) -> None:
        super().__init__()
        self.network = network
        # Messages in flight, in the order in which their transfers started. Each message is listed under its sender and
        # its receiver.
        self.in_flight: defaultdict[tuple[str, int], dict[InFlightMessage, None]] = defaultdict(dict)
        self.dead: set[int] = set()
        self._free_at: dict[tuple[int, int], int] = {}
        self._arrived_at: dict[tuple[int, int], int] = {}

    def arrival(self, wire: tuple[int, int], nbytes: int, scheduler: TaskScheduler) -> int:
        """Return the arrival time, in nanoseconds, of a message sent now; mark the link as busy while it is sent."""
        link = self.network.of(*wire)
        self._free_at[wire] = max(scheduler.now, self._free_at.get(wire, 0)) + round(
            nbytes * link.second_per_byte * 1e9
        )
        latency_s = link.latency_s * (1 + self.network.jitter * scheduler.chance())
        # A message must not overtake an earlier one on the same link.
        earliest = self._arrived_at.get(wire, 0) + 1
        self._arrived_at[wire] = max(earliest, self._free_at[wire] + round(latency_s * 1e9))
        return self._arrived_at[wire]


class _SimWork(CountdownWork):
    """Work whose `wait` lets other ranks run, and records, for reports, what this rank is waiting for."""

    def wait(self, timeout: Timeout | None = None) -> None:
        task = here()
        if task is not None:
            task.scheduler.pause()
        with waiting(lambda: describe(self._messages)):
            super().wait(timeout)


class SimTransport(ThreadTransport):
    """Transport between simulated ranks, which take turns in one process.

    `un.simulate` and `un.launch(fn, nprocs, "sim")` use this transport. As in the thread transport, a send completes
    only when it has been received. A message starts to travel when both its send and its receive have been posted. Its
    content is read from the sender's tensor only on arrival, which exposes programs that modify the tensor too early.
    Cost in real time: a few thread switches per message.
    """

    simulated = True
    # Let the simulated control plane compare calls, so that comparisons also take virtual time.
    checks = False
    _work = _SimWork
    devices: frozenset[str] = frozenset({"cpu"})
    host_staged: frozenset[str] = frozenset[str]()

    _queue: _NetworkQueue
    _control: ControlPlane

    @classmethod
    def connect(cls, group: Group, control: ControlPlane, options: Options) -> SimTransport:
        if here() is None and group.size > 1:
            raise UnavailableError("simulated ranks need the simulator: run them with un.simulate(fn, nprocs)")
        network = options.extra.get("network") or SimNetwork()
        return cls(group, control.share("sim/post", lambda: _NetworkQueue(network)), options.timeout_s)._under(control)

    def _under(self, control: ControlPlane) -> SimTransport:
        self._control = control
        link = self._queue.network.link
        self.latency_s: float = link.latency_s
        self.second_per_byte: float = link.second_per_byte
        return self

    def split(self, group: Group) -> SimTransport:
        return type(self)(group, self._queue, self._timeout_s)._under(self._control)

    def post(self, batch: Sequence[Message]) -> Work:
        scheduler = _scheduler()
        if self._is_dead:
            raise ClosedError("this rank was killed")
        for message in batch:
            way = f"to rank {message.peer}" if isinstance(message, Send) else f"from rank {message.peer}"
            scheduler.note(f"{self.group.name}: {format_bytes(message.tensor.nbytes)} {way} (tag {message.tag})")
        scheduler.pause()
        return super().post(batch)

    def _deliver(self, message: InFlightMessage) -> None:
        """Start the transfer of a matched message."""
        scheduler = _scheduler()
        name = self.group.name
        wire = self.group.members[message.source], self.group.members[message.target]
        for rank in (message.source, message.target):
            self._queue.in_flight[name, rank][message] = None
        arrival = self._queue.arrival(wire, message.sent.tensor.nbytes, scheduler)
        scheduler.at(arrival, lambda: self._arrive(name, message))

    def _arrive(self, group: str, message: InFlightMessage) -> None:
        for rank in {message.source, message.target}:
            flights = self._queue.in_flight[group, rank]
            del flights[message]
            if not flights:
                del self._queue.in_flight[group, rank]
        size = format_bytes(message.sent.tensor.nbytes)
        tag = message.sent.tag
        _scheduler().note(f"{group}: {size} from rank {message.source} reach rank {message.target} (tag {tag})")
        message.deliver()

    @property
    def _is_dead(self) -> bool:
        return self.group.members[self.rank] in self._queue.dead

    def leave(self) -> None:
        if not self._is_dead:
            super().leave()

    def close(self) -> None:
        if not self._is_dead:
            super().close()

    def abort(self, cause: BaseException) -> None:
        super().abort(cause)
        for message in list(self._queue.in_flight.get((self.group.name, self.rank), ())):
            if message.source == self.rank:
                # After an abort, the caller may reuse its tensor, so let the message continue with a copy.
                message.given = message.given.clone()
                message.send.complete(cause)
            else:
                message.taken = message.taken.clone()
                message.recv.complete(cause)

    def simulate_freeze(self, thawed: Event, freeze_s: float | None) -> None:
        with waiting(lambda: "for nothing: it is frozen, as configured"):
            super().simulate_freeze(thawed, freeze_s)

    def simulate_crash(self, error: BaseException) -> NoReturn:
        """Simulate the death of this rank: raise `error` in its program, stop its other threads, and disconnect it."""
        task = here()
        control = self._control
        if task is None or task.rank is None or not isinstance(control, SimulatedControl):
            raise error
        self._queue.dead.add(self.group.members[self.rank])
        control.die()
        for other in task.scheduler.of_rank(task.rank):
            if other is not task:
                task.scheduler.throw(other, error if other.main else EndedError())
        raise error if task.main else EndedError


def _scheduler() -> TaskScheduler:
    task = here()
    if task is None:
        raise PeerLostError("the simulation of this rank has ended")
    return task.scheduler


TRANSPORT = SimTransport


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of the link between two ranks. A message of n bytes takes latency_s + n * second_per_byte seconds.

    Messages are pipelined, so a busy link transfers 1 / second_per_byte bytes per second; latencies overlap. This
    is Hockney's postal (alpha-beta) model.

    Attributes:
        latency_s: Time from the first byte sent to the first byte received, in seconds.
        second_per_byte: Inverse of the link's bandwidth, in seconds per byte.
    """

    latency_s: float = 20e-6
    second_per_byte: float = 1e-10

    def __post_init__(self) -> None:
        if not (self.latency_s >= 0 and self.second_per_byte >= 0):
            raise ValueError(f"latency_s and second_per_byte must not be negative, as in {self}")


@dataclass(frozen=True, slots=True)
class SimNetwork:
    """Links between all ranks.

    Attributes:
        link: Link for all pairs not in `links`.
        links: Links by (source, destination), both of which are ranks in the whole simulation, not in a subgroup.
        jitter: Largest fraction by which a message's latency is randomly extended; the seed determines the values.
        request_s: Response time of the control plane in seconds.
        notice_s: Delay until the other ranks are notified of a rank's death.

    Example:
        >>> slow = SimNetwork(links={(0, 1): Link(latency_s=0.01)})
        >>> slow.of(0, 1).latency_s, slow.of(1, 0).latency_s
        (0.01, 2e-05)
    """

    link: Link = Link()
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    jitter: float = 0.0
    request_s: float = 50e-6
    notice_s: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("jitter", "request_s", "notice_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)!r}")

        for ends, link in self.links.items():
            if not (isinstance(ends, tuple) and len(ends) == 2 and all(isinstance(rank, int) for rank in ends)):
                raise TypeError(f"links must be named by (source, destination), such as (0, 1), not {ends!r}")
            if not isinstance(link, Link):
                raise TypeError(f"the link of {ends} must be a Link, not {link!r}")

    def check_ranks(self, size: int) -> None:
        """Check that all links are between existing ranks.

        Args:
            size: Number of ranks.

        Raises:
            ValueError: A link starts or ends at a rank that does not exist.
        """
        for ends in self.links:
            if not all(0 <= rank < size for rank in ends):
                raise ValueError(f"a link is between ranks {ends[0]} and {ends[1]}, but the ranks are 0 to {size - 1}")

    def of(self, source: int, target: int) -> Link:
        """Return the link from `source` to `target`."""
        return self.links.get((source, target), self.link)
