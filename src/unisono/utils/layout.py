"""Layout of sharded parameters: one after another in a flat tensor, which is cut into equal parts, one a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

__all__ = ["FlatLayout", "ParameterSlice"]


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """Elements of one parameter in one rank's part.

    Attributes:
        index: Number of the parameter.
        start: Its first element here, counted in the flattened parameter.
        numel: Number of elements, at least 1.
        offset: Place of the first element in the rank's part.
    """

    index: int
    start: int
    numel: int
    offset: int


class FlatLayout:
    """Places of parameters in a flat tensor of `ranks` equal parts. Elements after the last parameter are padding.

    Args:
        numels: Number of elements of each parameter.
        ranks: Number of parts.

    Attributes:
        offsets: Place of each parameter's first element in the flat tensor.
        part: Number of elements of a part.
        total: Number of elements of the flat tensor: a multiple of `ranks`, less than `ranks` over the sum.

    Method: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.

    Example:
        >>> layout = FlatLayout([3, 4], ranks=2)
        >>> layout.offsets, layout.part, layout.total
        ([0, 3], 4, 8)
        >>> layout.slices(0)
        [ParameterSlice(index=0, start=0, numel=3, offset=0), ParameterSlice(index=1, start=0, numel=1, offset=3)]
        >>> layout.slices(1)
        [ParameterSlice(index=1, start=1, numel=3, offset=0)]
    """

    def __init__(self, numels: Sequence[int], ranks: int) -> None:
        *self.offsets, used = accumulate(numels, initial=0)
        self.part = -(-used // ranks)
        self.total = self.part * ranks
        self._numels = numels

    def slices(self, rank: int) -> list[ParameterSlice]:
        """Return the slices in the part of a rank, in order."""
        low = rank * self.part
        high = (rank + 1) * self.part
        found = []
        for index, (offset, numel) in enumerate(zip(self.offsets, self._numels, strict=True)):
            first = max(offset, low)
            stop = min(offset + numel, high)
            if first < stop:
                found.append(ParameterSlice(index, first - offset, stop - first, first - low))
        return found
