"""Memory layout of the chunks of an algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

from unisono.collectives.algorithms.step import Move
from unisono.core.tensors import numels

__all__ = ["PACKED_BYTES", "Flat", "Layout", "PartialSums", "Pieces", "Region", "even_edges"]

PACKED_BYTES = 64 << 10
"""Largest message that is packed of several regions: a longer one is not worth the copy."""


class Region(NamedTuple):
    """A part of memory that one message fills: elements `start` to `stop` of the buffer `key`.

    `own` is this rank's contribution to a sum that is stored in `tensor`, if it is in other memory.
    """

    key: int
    start: int
    stop: int
    tensor: torch.Tensor
    own: torch.Tensor | None = None


def even_edges(numel: int, parts: int) -> list[int]:
    """Return the start of each of `parts` almost equal chunks, and the end; the first chunks are the longer ones.

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
        """The non-empty regions, of at most `segment_bytes`, of chunks `start` to `stop`."""

    def targets(self, start: int, stop: int, segment_bytes: int) -> list[Region]:
        """The same regions, as memory that received data is stored in."""
        return self.regions(start, stop, segment_bytes)

    def messages(self, move: Move, segment_bytes: int, *, receive: bool = False) -> list[list[Region]]:
        """The regions of each message that a move travels in: one, or several that are packed."""
        found: list[list[Region]] = []
        packed, most = 0, min(segment_bytes, PACKED_BYTES)
        for start, stop in move.runs:
            for region in (self.targets if receive else self.regions)(start, stop, segment_bytes):
                packed += region.tensor.nbytes
                if found and packed <= most:
                    found[-1].append(region)
                else:
                    found.append([region])
                    packed = region.tensor.nbytes
        return found


class Flat(Layout):
    """Chunks that are slices of one tensor: a run of them is one stretch.

    Args:
        tensor: One-dimensional and contiguous.
        edges: Where each chunk begins, and the end.
        key: Of the regions: the number of the tensor, where there are several.
    """

    def __init__(self, tensor: torch.Tensor, edges: Sequence[int], key: int = 0) -> None:
        self._tensor, self._edges, self._key = tensor, edges, key

    @classmethod
    def even(cls, tensor: torch.Tensor, chunks: int) -> Flat:
        return cls(tensor, even_edges(tensor.numel(), chunks))

    def regions(self, start: int, stop: int, segment_bytes: int) -> list[Region]:
        tensor, low, end, found = self._tensor, self._edges[start], self._edges[stop], []
        step = max(1, segment_bytes // tensor.element_size())
        while low < end:
            high = min(low + step, end)
            found.append(Region(self._key, low, high, tensor[low:high]))
            low = high
        return found


class Pieces(Layout):
    """Chunks that are tensors of their own: each travels by itself.

    Args:
        tensors: By chunk; one-dimensional and contiguous. A chunk that is missing is made, of
            `like`'s dtype, when it is first touched (what a rank only passes on).
        like: One of the call's tensors.
        lengths: Elements of each chunk; of `like` if empty.
    """

    def __init__(
        self, tensors: dict[int, torch.Tensor], like: torch.Tensor | None = None, lengths: Sequence[int] = ()
    ) -> None:
        self._tensors, self._like, self._lengths = tensors, like, lengths

    def regions(self, start: int, stop: int, segment_bytes: int) -> list[Region]:
        found = []
        for chunk in range(start, stop):
            if chunk not in self._tensors:
                assert self._like is not None
                numel = self._lengths[chunk] if self._lengths else self._like.numel()
                self._tensors[chunk] = self._like.new_empty(numel)
            tensor = self._tensors[chunk]
            found += Flat(tensor, (0, tensor.numel()), chunk).regions(0, 1, segment_bytes)
        return found


class PartialSums(Pieces):
    """Chunks of a reduce_scatter: inputs, which are only read, until something is reduced into them.

    Args:
        inputs: By chunk; one-dimensional and contiguous.
        rank: The chunk whose sum is this rank's result.
        output: Memory of the result.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], rank: int, output: torch.Tensor) -> None:
        super().__init__({rank: output}, output, numels(inputs))
        self._inputs, self._received = inputs, set[int]()

    def regions(self, start: int, stop: int, segment_bytes: int) -> list[Region]:
        found = []
        for chunk in range(start, stop):
            if chunk in self._received:
                found += super().regions(chunk, chunk + 1, segment_bytes)
            else:
                tensor = self._inputs[chunk]
                found += Flat(tensor, (0, tensor.numel()), chunk).regions(0, 1, segment_bytes)
        return found

    def targets(self, start: int, stop: int, segment_bytes: int) -> list[Region]:
        # Of several contributions in one step, the first region has this rank's own.
        own = self.regions(start, stop, segment_bytes)
        self._received.update(range(start, stop))
        stored = self.regions(start, stop, segment_bytes)
        return [target._replace(own=mine.tensor) for target, mine in zip(stored, own, strict=True)]
