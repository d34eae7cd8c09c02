"""How a rank lays ready what others read: by plain stores or past the caches, whichever is faster now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unisono.compiled import part

__all__ = ["Laying"]

_LEAST = 1 << 12
"""Bytes from which it makes a difference."""
_SUMMED = (torch.float32, torch.float64)


class Laying:
    """Of one rank of one group; src/compiled/storing.c chooses. All tensors are one-dimensional and plain."""

    def __init__(self) -> None:
        made = part("Storing")
        self.storing: Any = None if made is None else made()

    def lay(self, into: torch.Tensor, given: torch.Tensor) -> None:
        """Copy to memory that others read, from some that is as long and of the same dtype."""
        if self.storing is None or given.nbytes < _LEAST:
            into.copy_(given)
        else:
            self.storing.store(into.data_ptr(), given.data_ptr(), given.nbytes)

    def sums(self, dtype: torch.dtype) -> bool:
        """Whether there is a `sum` of these."""
        return self.storing is not None and dtype in _SUMMED

    def sum(self, rows: Sequence[torch.Tensor], into: torch.Tensor | None, shown: torch.Tensor | None) -> None:
        """The sum of two rows or more, in their order, to memory of this rank's own and to some that others read."""
        first = rows[0]
        self.storing.sum(
            tuple([row.data_ptr() for row in rows]),
            0 if into is None else into.data_ptr(),
            0 if shown is None else shown.data_ptr(),
            first.nbytes,
            first.element_size(),
        )
