"""Iterator over a rank's samples that counts how many samples it has yielded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from operator import length_hint
from typing import Any, Protocol

import torch

from unisono.data.indices import Indices

__all__ = ["SampleSource", "StatefulIterator", "walk"]

# Lengths of runs of samples. The first sample is a run by itself, so that it is available immediately. Later runs of
# samples are long enough for vector instructions, and short enough that their data, less than 1 MiB, fits into the
# cache.
_FIRST = 1
_LONGEST = 4096


class SampleSource:
    """Samples of a sequence from a start position, grouped into runs.

    After the last run, `runs` sets `over` and calls `ended`.
    """

    def __init__(self, indices: Indices, start: int, ended: Callable[[], None]) -> None:
        self._indices = indices
        self._at = start
        self._ended = ended
        self._run: Iterator[Any] = iter(())
        self.over: bool = False

    def runs(self) -> Iterator[Iterator[Any]]:
        length = _FIRST
        while self._at < len(self._indices):
            start = self._at
            self._at = min(self._at + length, len(self._indices))
            positions = torch.arange(start, self._at, device="cpu") if length > 1 else None
            self._run = iter([self._indices.at(start)] if positions is None else self._indices.values(positions))
            length = min(64 * length, _LONGEST)
            yield self._run
        self.over = True
        self._ended()

    @property
    def consumed(self) -> int:
        """Position of the next sample."""
        return self._at - length_hint(self._run)

    def replace(self, other: SampleSource) -> None:
        """Continue from another source's position."""
        deque(self._run, maxlen=0)
        self._indices = other._indices
        self._at = other._at
        self._ended = other._ended


class _StatefulSampler(Protocol):
    """Sampler that saves and loads the state of an iteration."""

    def _walk_state(self, token: Any, given: int, through: bool | None) -> dict[str, Any]: ...
    def _load_walk(self, state: Any) -> tuple[SampleSource, Any]: ...


class StatefulIterator(chain[Any]):
    """Iterator with a state, as torchdata's StatefulDataLoader expects. Calling `next` does not run any Python code.

    The iterator's state is the state that the sampler would have if all samples yielded so far were committed.
    """

    _source: SampleSource
    _sampler: _StatefulSampler
    _token: Any

    def state_dict(self) -> dict[str, Any]:
        return self._sampler._walk_state(self._token, self._source.consumed, self._source.over)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        source, self._token = self._sampler._load_walk(state)
        self._source.replace(source)


def walk(source: SampleSource, sampler: _StatefulSampler, token: Any) -> StatefulIterator:
    """Return an iterator over the source's samples; `token` tells the sampler which pass this is."""
    made = StatefulIterator.from_iterable(source.runs())
    assert isinstance(made, StatefulIterator)
    made._source = source
    made._sampler = sampler
    made._token = token
    return made
