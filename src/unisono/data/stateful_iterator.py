"""A rank's progress through its samples, and an iterator that counts how many samples it has yielded."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from operator import length_hint
from typing import Any, Protocol

import torch

from unisono.data.indices import Indices

__all__ = ["EpochProgress", "SampleSource", "StatefulIterator", "walk"]

# Lengths of runs of samples. The first sample is a run by itself, so that it is available immediately. Later runs of
# samples are long enough for vector instructions, and short enough that their data, less than 1 MiB, fits into the
# cache.
_FIRST = 1
_LONGEST = 4096


@dataclass(eq=False)
class EpochProgress:
    """One pass of this rank through its samples.

    Attributes:
        state: The entries of the sampler's state that are constant during the pass.
        indices: The samples of the pass.
        start, taken: Number of samples committed at the start of the pass, and number of samples committed so far.
        batch: Largest number of samples committed in one call of `advance`.
        begun: Whether an iteration has started.
        ended: Whether an iteration has reached the end.
        through: Whether ranks whose part is one sample longer have used their last sample; meaningful once this rank
            has used all its samples. None if unknown.
        over: Whether the requested epoch was already complete in the loaded state, so that the pass must not start
            over.
    """

    state: dict[str, Any]
    indices: Indices
    start: int = 0
    taken: int = 0
    batch: int = 0
    begun: bool = False
    ended: bool = False
    through: bool | None = False
    over: bool = False

    @property
    def complete(self) -> bool:
        return self.taken == len(self.indices)

    def advance(self, count: int) -> None:
        self.taken += count
        if count and self.complete:
            # A batch that is shorter than earlier batches is the last batch on all ranks. If the iteration ended before
            # its last samples were committed, a loader is prefetching batches, so it is unknown whether other ranks
            # have used one more sample.
            self.through = True if count < self.batch else None if self.ended else False
        self.batch = max(self.batch, count)

    def end(self) -> None:
        self.ended = True
        # By the time any rank saves a state, all ranks have left this loop, and so have used their last samples.
        self.through = True if self.complete and self.through is False else self.through


class _StatefulSampler(Protocol):
    """Sampler that saves and loads the state of an iteration."""

    def _walk_state(self, progress: EpochProgress, given: int, through: bool | None) -> dict[str, Any]: ...
    def _load_walk(self, state: Any) -> SampleSource: ...
    def _end(self, which: EpochProgress) -> None: ...


class SampleSource:
    """Uncommitted samples of a pass, grouped into runs.

    After the last run, `runs` sets `over`, and ends the pass in the sampler.
    """

    def __init__(self, sampler: _StatefulSampler, progress: EpochProgress) -> None:
        self.sampler = sampler
        self.progress = progress
        self._at = progress.taken
        self._run: Iterator[Any] = iter(())
        self.over: bool = False

    def runs(self) -> Iterator[Iterator[Any]]:
        length = _FIRST
        while self._at < len(self.progress.indices):
            indices = self.progress.indices
            start = self._at
            self._at = min(self._at + length, len(indices))
            positions = torch.arange(start, self._at, device="cpu") if length > 1 else None
            self._run = iter([indices.at(start)] if positions is None else indices.values(positions))
            length = min(64 * length, _LONGEST)
            yield self._run
        self.over = True
        self.sampler._end(self.progress)

    @property
    def consumed(self) -> int:
        """Position of the next sample."""
        return self._at - length_hint(self._run)

    def replace(self, other: SampleSource) -> None:
        """Continue from another source's position."""
        deque(self._run, maxlen=0)
        self.progress = other.progress
        self._at = other._at


class StatefulIterator(chain[Any]):
    """Iterator with a state, as torchdata's StatefulDataLoader expects. Calling `next` does not run any Python code.

    The iterator's state is the state that the sampler would have if all samples yielded so far were committed.
    """

    _source: SampleSource

    def state_dict(self) -> dict[str, Any]:
        source = self._source
        return source.sampler._walk_state(source.progress, source.consumed, source.over)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._source.replace(self._source.sampler._load_walk(state))


def walk(source: SampleSource) -> StatefulIterator:
    """Return an iterator over the source's samples."""
    made = StatefulIterator.from_iterable(source.runs())
    assert isinstance(made, StatefulIterator)
    made._source = source
    return made
