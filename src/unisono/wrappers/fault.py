"""Injects faults: lost, late, duplicated, reordered or corrupted messages, and ranks that die, freeze or are slow."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence, Set
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
from unisono.wrappers.rank_faults import RankFaults

__all__ = ["Faulty", "KilledError", "check_faults"]

_CHANCES = ("drop", "delay", "duplicate", "reorder", "corrupt")
_DELAYING = frozenset({"delay", "reorder"})


class KilledError(Exception):
    """Raised in a rank that `Faulty` has killed, if ranks are threads. A rank that is a process gets SIGKILL instead.

    Example:
        >>> def program(comm):
        ...     try:
        ...         comm.isend(torch.ones(1), 1 - comm.rank)
        ...     except KilledError as error:
        ...         return str(error)
        >>> dies = un.testing.RankFaults(kill_at=1, ranks=[1])
        >>> un.launch(program, 2, "thread", wrap=lambda inner: Faulty(inner, seed=1, on_ranks=dies))[1]
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
    on_ranks: RankFaults | None

    def __post_init__(self) -> None:
        for name in (*_CHANCES, "delay_s"):
            if not isinstance(getattr(self, name), int | float):
                raise TypeError(f"{name} must be a number, not {getattr(self, name)!r}")
        for name in _CHANCES:
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be a probability from 0 to 1, not {getattr(self, name)!r}")
        if not self.delay_s >= 0:
            raise ValueError(f"delay_s must not be negative, not {self.delay_s!r}")
        if not isinstance(self.on_ranks, RankFaults | None):
            raise TypeError(f"on_ranks must be a unisono.testing.RankFaults, not {self.on_ranks!r}")


class Faulty(Wrapper):
    """Injects faults: damages messages at random, and kills, freezes or slows ranks. A seed makes runs reproducible.

    A message's fault depends only on the seed, the group, the two ranks, the tag, and the message's number among the
    messages with the same ranks and tag. A run can therefore be repeated, whatever its timing. This wrapper hides
    native collectives, so that collectives consist of messages, which faults can affect. Only sends are affected. To
    detect the damage, wrap this transport in `Checksummed`.

    Args:
        inner: The transport to inject faults into.
        seed: Seed for all random choices.
        drop: Probability that a message is lost, although its send succeeds.
        delay: Probability that a message is sent late. Later messages with the same tag to the same rank wait behind a
            late message.
        duplicate: Probability that a message arrives twice.
        reorder: Probability that a message is overtaken by the next message with the same tag to the same rank, if the
            latter is sent within `delay_s`.
        corrupt: Probability that one bit of a message changes in flight.
        delay_s: Delay of late messages, in seconds.
        on_ranks: Ranks that are killed, freeze or run slowly.

    Raises:
        ValueError: A probability is not between 0 and 1, or the delay is negative.
        TypeError: An argument is not a number, or `on_ranks` is not a `RankFaults`.

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
        on_ranks: RankFaults | None = None,
    ) -> None:
        super().__init__(inner)
        self._faults = _Faults(
            seed=seed,
            drop=drop,
            delay=delay,
            duplicate=duplicate,
            reorder=reorder,
            corrupt=corrupt,
            delay_s=delay_s,
            on_ranks=on_ranks,
        )
        self._rank_faults = _of_rank(on_ranks or RankFaults(), self.group.members[self.rank])
        slow = self._rank_faults.slow_bytes_per_s is not None
        self._harmless = not slow and not any(getattr(self._faults, name) for name in _CHANCES)
        self._posts = 0
        self._sent: Counter[Stream] = Counter()
        self._late = DelayQueue(inner)
        self._slowness = LinkModel(0.0, self._rank_faults.slow_bytes_per_s)
        self._thawed = threading.Event()
        # A list with the name of the group in which this rank froze; empty until then. Subgroups share this list, so
        # that the rank freezes only once.
        self._frozen: list[str] = []

    def wrap_child(self, inner: Transport) -> Faulty:
        child = Faulty(inner, **{field.name: getattr(self._faults, field.name) for field in fields(self._faults)})
        child._frozen = self._frozen
        return child

    def post(self, batch: Sequence[Message]) -> Work:
        self._posts += 1
        if self._posts == self._rank_faults.kill_at:
            self.simulate_crash(
                KilledError(f"rank {self.rank} of {self.size} was killed at its post {self._posts}, as configured")
            )
        if self._posts == self._rank_faults.freeze_at and not self._frozen:
            self._frozen.append(self.group.name)
            self.simulate_freeze(self._thawed, self._rank_faults.freeze_s)
        if self._harmless:
            return self.inner.post(batch)
        prompt: list[Message] = []
        again: list[Send] = []
        late: list[DelayedSend] = []
        for message in batch:
            if not isinstance(message, Send):
                prompt.append(message)
                continue
            faults, where = self._decide(message)
            if "drop" in faults:
                continue
            sent = _corrupted(message, where) if "corrupt" in faults else message
            copies = [sent, replace(sent, tensor=sent.tensor.clone())] if "duplicate" in faults else [sent]
            if self._is_late(message, faults, late):
                late += [
                    DelayedSend(copy, self._due(copy, faults), "reorder" in faults and copy is sent) for copy in copies
                ]
            else:
                prompt.append(sent)
                again += copies[1:]
        # Post receives first, because they must not wait behind late sends.
        posted = self.inner.post(prompt)
        if again:
            # The returned work does not include the duplicates, because nothing waits for them.
            self.inner.post(again)
        return WorkGroup([posted, self._late.post(late)]) if late else posted

    def _is_late(self, send: Send, faults: Set[str], late: Sequence[DelayedSend]) -> bool:
        stream = (send.peer, send.tag)
        behind = self._late.queued(stream) or any((held.send.peer, held.send.tag) == stream for held in late)
        return bool(faults & _DELAYING) or behind or self._rank_faults.slow_bytes_per_s is not None

    def _due(self, send: Send, faults: Set[str]) -> float:
        return self._slowness.due(send, self._faults.delay_s if faults & _DELAYING else 0.0)

    def _decide(self, message: Send) -> tuple[Set[str], float]:
        """Return a message's faults, and the position of a changed bit as a fraction of the message's length."""
        stream = (message.peer, message.tag)
        self._sent[stream] += 1
        chance = Random(f"{self._faults.seed} {self.group.name} {self.rank} {stream} {self._sent[stream]}")
        faults = {name for name in _CHANCES if chance.random() < getattr(self._faults, name)}
        return faults, chance.random()

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
    """Check the arguments of `Faulty`, except the seed, before any ranks are started.

    Args:
        faults: The arguments, by name.
        size: Number of ranks.

    Raises:
        ValueError, TypeError: An argument is unknown or invalid, or a rank does not exist.
    """
    parameters = signature(Faulty).parameters.items()
    defaults = {name: parameter.default for name, parameter in parameters if parameter.default is not Parameter.empty}
    for name in faults:
        if name not in defaults:
            raise ValueError(unknown_name("fault", name, defaults))
    checked = _Faults(seed=0, **{**defaults, **faults})
    for rank in (checked.on_ranks and checked.on_ranks.ranks) or ():
        if not 0 <= rank < size:
            raise ValueError(f"faults name rank {rank}, but the ranks are 0 to {size - 1}")


def _of_rank(faults: RankFaults, rank: int) -> RankFaults:
    """Return the faults of one rank, which is given by its number in the job's initial group."""
    return faults if faults.ranks is None or rank in faults.ranks else RankFaults()


def _corrupted(send: Send, where: float) -> Send:
    """Return a copy of the message with one bit changed; the sender's tensor is not modified."""
    if not send.tensor.nbytes:
        return send
    changed = send.tensor.clone()
    index, bit = divmod(int(where * changed.nbytes * 8), 8)
    changed.view(torch.uint8)[index] ^= 1 << bit
    return replace(send, tensor=changed)
