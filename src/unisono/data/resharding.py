"""Division of an epoch's remaining samples into parts, after parts have used some of their samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from unisono.data.indices import Concatenated, Indices, Places, select, taken_from
from unisono.data.partitioner import Partitioner, equal_shares

__all__ = ["Evening", "Resharding", "ShardingPhase", "added", "deal", "in_step", "leftover"]

Evening = Literal["none", "drop", "pad"]
"""How to equalize parts: not at all, by cutting to the shortest part, or by repeating samples up to the longest."""


@dataclass(frozen=True)
class ShardingPhase:
    """A finished phase of an epoch. A phase ends when the number of parts changes.

    Attributes:
        parts: Number of parts.
        taken: Number of samples that each part has committed.
        settings: The partitioner's settings during the phase.
    """

    parts: int
    taken: tuple[int, ...]
    settings: dict[str, Any]

    def plain(self) -> dict[str, Any]:
        return {"parts": self.parts, "taken": list(self.taken), "settings": self.settings}


@dataclass(frozen=True)
class Resharding:
    """Remaining samples of an epoch, and each part's positions in this sequence."""

    rest: Indices
    parts: Sequence[Places]
    interleaved: bool
    evening: Evening = "none"

    @property
    def lengths(self) -> list[int]:
        """The number of samples in each part."""
        lengths = [len(part) for part in self.parts]
        even = {"none": None, "drop": min(lengths), "pad": max(lengths)}[self.evening]
        return lengths if even is None else [even] * len(lengths)

    def part(self, number: int) -> Indices:
        """Return the samples of one part, in order."""
        positions = self.parts[number]
        length = self.lengths[number]
        selected = select(self.rest, [positions[:length]])
        if length <= len(positions):
            return selected
        return Concatenated([selected, select(self.rest, [self._padding(number, len(positions), length)])])

    def _padding(self, number: int, start: int, stop: int) -> torch.Tensor:
        """Return the positions of the samples that pad a part.

        If parts are interleaved or the part is empty, padding is taken round-robin from the beginning of the sequence;
        otherwise, the part's own samples are repeated in order.
        """
        more = torch.arange(start, stop, device="cpu")
        if self.interleaved or not start:
            return (number + len(self.parts) * more) % len(self.rest)
        return taken_from(self.parts[number], 0, start)[more % start]


def deal(
    rule: Partitioner, order: Indices, phases: Sequence[ShardingPhase], parts: int, seed: int, evening: Evening = "none"
) -> Resharding:
    """Replay the finished phases of an epoch, and assign the remaining samples to parts."""
    for phase in phases:
        earlier = rule.replaced(phase.settings).divide(order, equal_shares(phase.parts), seed)
        order = select(order, leftover(earlier, phase.taken, len(order)))
    return Resharding(order, rule.divide(order, equal_shares(parts), seed), rule.interleaves, evening)


def leftover(parts: Sequence[Places], taken: Sequence[int], count: int) -> list[Places]:
    """Return the ascending positions below `count` that are unused if part p has used its first `taken[p]` samples.

    Example:
        >>> leftover([range(0, 9, 3), range(1, 9, 3), range(2, 9, 3)], [2, 1, 1], 9)
        [tensor([4, 5]), range(6, 9)]
    """
    left = [part[used:] for part, used in zip(parts, taken, strict=True)]
    ranges = [part for part in left if isinstance(part, range)]
    if len(ranges) < len(left):
        return [torch.cat([taken_from(part, 0, len(part)) for part in left]).sort().values]
    if all(part.step == 1 for part in ranges):
        return [*sorted((part for part in ranges if part), key=lambda part: part.start)]
    # The parts are interleaved, and each part's next position is its `start`, so all positions from the largest `start`
    # onwards are unused.
    edge = min(count, max(part.start for part in ranges))
    early = sorted(position for part in ranges for position in range(part.start, min(edge, part.stop), part.step))
    tail = range(edge, count)
    return [torch.tensor(early, device="cpu"), tail] if early else [tail]


def in_step(lengths: Sequence[int], total: int) -> list[int]:
    """Return how many samples each part has used after parts took `total` samples round-robin, skipping finished parts.

    Example:
        >>> in_step([4, 2, 3], 7), in_step([4, 4, 4], 7)
        ([3, 2, 2], [3, 2, 2])
    """
    low = 0
    high = max(lengths)
    while low < high:
        rounds = (low + high + 1) // 2
        low, high = (rounds, high) if sum(min(rounds, n) for n in lengths) <= total else (low, rounds - 1)
    given = [min(low, n) for n in lengths]
    over = total - sum(given)
    for part in [part for part, n in enumerate(lengths) if n > low][:over]:
        given[part] += 1
    return given


def added(
    phases: Sequence[ShardingPhase], last: ShardingPhase, rule: Partitioner, lengths: Sequence[int]
) -> list[ShardingPhase]:
    """Return the phases with `last` appended, merging phases if possible.

    Interleaved parts that progress at the same pace have together used a prefix of the order, for any number of parts.
    Phases with such progress are merged, so a job that is resumed a thousand times still has a single phase.
    """
    total = sum(last.taken)
    if not total:
        return list(phases)
    if not rule.interleaves or list(last.taken) != in_step(lengths, total):
        return [*phases, last]
    before = 0
    if phases and phases[-1].parts == 1:
        before = phases[-1].taken[0]
        phases = phases[:-1]
    return [*phases, ShardingPhase(1, (before + total,), {})]
