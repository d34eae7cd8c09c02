"""Where the chunks of a schedule lie in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

__all__ = ["Flat", "Layout", "Pieces", "Region", "even_edges"]


class Region(NamedTuple):
    """A part of memory that one message fills: elements `start` to `stop` of the buffer `key`."""

    key: int
    start: int
    stop: int
    tensor: torch.Tensor

    def overlaps(self, other: Region) -> bool:
        return self.key == other.key and self.start < other.stop and other.start < self.stop


def even_edges(numel: int, parts: int) -> list[int]:
    """Where each of `parts` almost equal chunks begins, and the end; the first ones are the longer ones.

    Example:
        >>> even_edges(10, 4)
        [0, 3, 6, 8, 10]
    """
    quotient, rest = divmod(numel, parts)
    return [i * quotient + min(i, rest) for i in range(parts + 1)]


class Layout(ABC):
    """A buffer of chunks. Both ends of a message cut it alike, whatever their memory looks like."""

    @abstractmethod
    def regions(self, start: int, stop: int, segment_bytes: int) -> list[Region]:
        """The non-empty messages, of at most `segment_bytes`, that chunks `start` to `stop` travel in."""


class Flat(Layout):
    """Chunks that are slices of one tensor: a run of them is one stretch.

    Args:
        tensor: One-dimensional and contiguous.
        edges: Where each chunk begins, and the end.
    """

    def __init__(self, tensor: torch.Tensor, edges: Sequence[int]) -> None:
        self._tensor, self._edges = tensor, edges

    @classmethod
    def even(cls, tensor: torch.Tensor, chunks: int) -> Flat:
        return cls(tensor, even_edges(tensor.numel(), chunks))

    @classmethod
    def sized(cls, tensor: torch.Tensor, sizes: Sequence[int]) -> Flat:
        return cls(tensor, [0, *accumulate(sizes)])

    def regions(self, start: int, stop: int, segment_bytes: int) -> list[Region]:
        return _cut(0, self._tensor, self._edges[start], self._edges[stop], segment_bytes)


class Pieces(Layout):
    """Chunks that are tensors of their own: each travels by itself.

    Args:
        tensors: By chunk; one-dimensional and contiguous. A chunk that is missing is made, of
            `like`'s length and dtype, when it is first touched (what a rank only passes on).
    """

    def __init__(self, tensors: dict[int, torch.Tensor], like: torch.Tensor | None = None) -> None:
        self._tensors, self._like = tensors, like

    def regions(self, start: int, stop: int, segment_bytes: int) -> list[Region]:
        found = []
        for chunk in range(start, stop):
            if chunk not in self._tensors:
                assert self._like is not None
                self._tensors[chunk] = torch.empty_like(self._like)
            tensor = self._tensors[chunk]
            found += _cut(chunk, tensor, 0, tensor.numel(), segment_bytes)
        return found


def _cut(key: int, tensor: torch.Tensor, start: int, stop: int, segment_bytes: int) -> list[Region]:
    step = max(1, segment_bytes // tensor.element_size())
    if start < stop <= start + step:
        return [Region(key, start, stop, tensor[start:stop])]
    return [
        Region(key, low, min(low + step, stop), tensor[low : min(low + step, stop)]) for low in range(start, stop, step)
    ]
