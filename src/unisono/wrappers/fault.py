"""Fault injection: lost, late, duplicated, swapped or corrupted messages; ranks that die, freeze or are slow."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from inspect import Parameter, signature
from random import Random
from typing import Any

import torch

from unisono.core.registry import unknown_name
from unisono.core.transport import Transport
from unisono.core.types import Message, Send, Work
from unisono.core.work import WorkGroup
from unisono.errors import ClosedError
from unisono.wrappers.base import Wrapper
from unisono.wrappers.delay import LinkModel
from unisono.wrappers.delay_queue import DelayedSend, DelayQueue, Stream

__all__ = ["Faulty", "KilledError", "check_faults"]

_CHANCES = ("drop", "delay", "duplicate", "reorder", "corrupt")


class KilledError(Exception):
    """Raised in a rank that `Faulty` has killed, where ranks are threads: a process would be gone.

    Example:
        >>> def program(comm):
        ...     try:
        ...         comm.isend(torch.ones(1), 1 - comm.rank)
        ...     except KilledError as error:
        ...         return str(error)
        >>> un.launch(program, 2, "thread", wrap=lambda inner: Faulty(inner, seed=1, kill_at=1, ranks=[1]))[1]
        'rank 1 of 2 was killed at its post 1, as configured'
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class _Faults:
    """Parameters of `Faulty`."""

    seed: int
    drop: float
    delay: float
    duplicate: float
    reorder: float
    corrupt: float
    delay_s: float
    kill_at: int | None
    freeze_at: int | None
    freeze_s: float | None
    slow_bytes_per_s: float | None
    ranks: tuple[int, ...] | None

    def __post_init__(self) -> None:
        for name in (*_CHANCES, "delay_s", "freeze_s", "slow_bytes_per_s"):
            if not isinstance(getattr(self, name), int | float | None):
                raise TypeError(f"{name} must be a number, not {getattr(self, name)!r}")
        for name in _CHANCES:
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be a probability from 0 to 1, not {getattr(self, name)!r}")
        for name in ("delay_s", "freeze_s"):
            if not (getattr(self, name) or 0.0) >= 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)!r}")
        for name in ("kill_at", "freeze_at"):
            at = getattr(self, name)
            if at is not None and not (isinstance(at, int) and at >= 1):
                raise ValueError(f"{name} must be at least 1 and a whole number, not {at!r}")
        if self.slow_bytes_per_s is not None and not self.slow_bytes_per_s > 0:
            raise ValueError(f"slow_bytes_per_s must be positive, not {self.slow_bytes_per_s!r}")

    @property
    def some(self) -> bool:
        """Return whether any fault can affect a message."""
        return any(getattr(self, name) for name in _CHANCES) or self.slow_bytes_per_s is not None

    def of_rank(self, rank: int) -> _Faults:
        """Return the faults of one rank."""
        if self.ranks is None or rank in self.ranks:
            return self
        return replace(self, kill_at=None, freeze_at=None, slow_bytes_per_s=None)


class Faulty(Wrapper):
    """Injects faults: corrupts messages at random, and kills, freezes or slows ranks. Reproducible by its seed.

    The fault of a message depends on the seed, the group, both ranks, the tag, and the message's number among
    these: so a run can be repeated, whatever the timing. Native collectives are hidden; collectives composed
    of messages are affected through these. Only sends are affected: wrap it in `Checksummed` (outside, so that
    it sees the damage) to detect the faults.

    Args:
        inner: The transport to inject faults into.
        seed: Seed of all random choices.
        drop: Probability that a message is lost. Its sender sees success.
        delay: Probability that a message is sent late. Later ones of the same tag to the same rank queue behind it.
        duplicate: Probability that a message arrives twice.
        reorder: Probability that a message is overtaken by the next one of its tag to its rank, if that is sent
            within `delay_s`.
        corrupt: Probability that one bit of a message changes in flight.
        delay_s: Delay of late messages, in seconds.
        kill_at: Number of the `post`, counted from 1 in each group, at which the rank ends: by SIGKILL, or by
            `KilledError` where ranks are threads. Never if None.
        freeze_at: Number of the `post`, in the first group to reach it, at which the rank freezes, once, alive to
            the control plane. Never if None.
        freeze_s: Duration of the freeze, in seconds; until its group has failed or is closed, if None.
        slow_bytes_per_s: Bandwidth of the link to each rank, in bytes per second; unlimited if None.
        ranks: Ranks affected by `kill_at`, `freeze_at` and `slow_bytes_per_s`, by their numbers in the job's first
            group; all if None.

    Raises:
        ValueError: A probability outside 0 to 1, a negative duration, a number of a post below 1, or a bandwidth
            that is not positive.
        TypeError: An argument is no number, or `ranks` no sequence of ranks.

    Example:
        >>> def program(comm):
        ...     t = torch.ones(2)
        ...     comm.all_reduce(t)
        ...     return t.tolist()
        >>> un.launch(program, 2, "thread", wrap=lambda inner: Faulty(inner, seed=1, delay=0.5, delay_s=0.01))
        [[2.0, 2.0], [2.0, 2.0]]
    """

    def __init__(
        self,
        inner: Transport,
        *,
        seed: int,
        drop: float = 0.0,
        delay: float = 0.0,
        duplicate: float = 0.0,
        reorder: float = 0.0,
        corrupt: float = 0.0,
        delay_s: float = 0.02,
        kill_at: int | None = None,
        freeze_at: int | None = None,
        freeze_s: float | None = None,
        slow_bytes_per_s: float | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        super().__init__(inner)
        self._configured = _Faults(
            seed=seed,
            drop=drop,
            delay=delay,
            duplicate=duplicate,
            reorder=reorder,
            corrupt=corrupt,
            delay_s=delay_s,
            kill_at=kill_at,
            freeze_at=freeze_at,
            freeze_s=freeze_s,
            slow_bytes_per_s=slow_bytes_per_s,
            ranks=_rank_numbers(ranks),
        )
        self._faults = self._configured.of_rank(self.group.members[self.rank])
        self._posts = 0
        self._sent: Counter[Stream] = Counter()
        self._late = DelayQueue(inner)
        self._slowness = LinkModel(0.0, self._faults.slow_bytes_per_s)
        self._thawed = threading.Event()
        # Shared by all groups of this rank with the same origin.
        self._frozen: list[str] = []

    def wrap_child(self, inner: Transport) -> Faulty:
        child = Faulty(
            inner, **{field.name: getattr(self._configured, field.name) for field in fields(self._configured)}
        )
        child._frozen = self._frozen
        return child

    def post(self, batch: Sequence[Message]) -> Work:
        self._posts += 1
        if self._posts == self._faults.kill_at:
            self.simulate_crash(
                KilledError(f"rank {self.rank} of {self.size} was killed at its post {self._posts}, as configured")
            )
        if self._posts == self._faults.freeze_at and not self._frozen:
            self._frozen.append(self.group.name)
            self.simulate_freeze(self._thawed, self._faults.freeze_s)
        if not self._faults.some:
            return self.inner.post(batch)
        prompt: list[Message] = []
        again: list[Send] = []
        late: list[DelayedSend] = []
        for message in batch:
            if not isinstance(message, Send):
                prompt.append(message)
                continue
            decision = self._decide(message)
            if decision.dropped:
                continue
            sent = _corrupted(message, decision) if decision.corrupted else message
            copies = [sent, replace(sent, tensor=sent.tensor.clone())] if decision.doubled else [sent]
            if self._is_late(message, decision, late):
                late += [
                    DelayedSend(copy, self._due(copy, decision), decision.swapped and copy is sent) for copy in copies
                ]
            else:
                prompt.append(sent)
                again += copies[1:]
        # Receives first: they must not queue behind late sends.
        posted = self.inner.post(prompt)
        if again:
            # No rank waits for the duplicates.
            self.inner.post(again)
        return WorkGroup([posted, self._late.post(late)]) if late else posted

    def _is_late(self, send: Send, decision: _FaultDecision, late: Sequence[DelayedSend]) -> bool:
        stream = (send.peer, send.tag)
        behind = self._late.queued(stream) or any((held.send.peer, held.send.tag) == stream for held in late)
        return decision.delayed or decision.swapped or behind or self._faults.slow_bytes_per_s is not None

    def _due(self, send: Send, decision: _FaultDecision) -> float:
        return self._slowness.due(send, self._faults.delay_s if decision.delayed or decision.swapped else 0.0)

    def _decide(self, message: Send) -> _FaultDecision:
        stream = (message.peer, message.tag)
        self._sent[stream] += 1
        chance = Random(f"{self._faults.seed} {self.group.name} {self.rank} {stream} {self._sent[stream]}")
        drop, delay, double, swap, corrupt = (chance.random() < getattr(self._faults, name) for name in _CHANCES)
        return _FaultDecision(drop, delay, double, swap, corrupt, chance.random())

    def close(self) -> None:
        self._end(ClosedError("the communicator was closed"))
        super().close()

    def abort(self, cause: BaseException) -> None:
        self._end(cause)
        super().abort(cause)

    def _end(self, cause: BaseException) -> None:
        self._thawed.set()
        self._late.stop(cause)


def check_faults(faults: Mapping[str, Any], size: int) -> None:
    """Check the arguments of `Faulty`, but for the seed, before ranks exist.

    Args:
        faults: The arguments, by name.
        size: Number of ranks.

    Raises:
        ValueError, TypeError: An argument that does not exist or is invalid, or a rank that does not exist.
    """
    parameters = signature(Faulty).parameters.items()
    defaults = {name: parameter.default for name, parameter in parameters if parameter.default is not Parameter.empty}
    for name in faults:
        if name not in defaults:
            raise ValueError(unknown_name("fault", name, defaults))
    given = {**defaults, **faults}
    checked = _Faults(seed=0, **{**given, "ranks": _rank_numbers(given["ranks"])})
    for rank in checked.ranks or ():
        if not 0 <= rank < size:
            raise ValueError(f"faults name rank {rank}, but the ranks are 0 to {size - 1}")


def _rank_numbers(ranks: Sequence[int] | None) -> tuple[int, ...] | None:
    if ranks is None:
        return None
    if isinstance(ranks, int) or not all(isinstance(rank, int) for rank in ranks):
        raise TypeError(f"ranks must be a sequence of ranks such as [1], not {ranks!r}")
    return tuple(ranks)


@dataclass(frozen=True, slots=True)
class _FaultDecision:
    """Decision about one message; `where` is the position of the bit that changes, as a fraction of its length."""

    dropped: bool
    delayed: bool
    doubled: bool
    swapped: bool
    corrupted: bool
    where: float


def _corrupted(send: Send, decision: _FaultDecision) -> Send:
    """Return the message with one bit changed; the sender's tensor is not modified."""
    if not send.tensor.nbytes:
        return send
    changed = send.tensor.clone()
    index, bit = divmod(int(decision.where * changed.nbytes * 8), 8)
    changed.view(torch.uint8)[index] ^= 1 << bit
    return replace(send, tensor=changed)
