"""Tensors in all memory layouts that occur in practice, with guard bytes around them."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isqrt

import torch

__all__ = ["LAYOUTS", "LINEAR", "LaidOutTensor", "place"]

LINEAR = ("contiguous", "offset", "every second", "conjugate")
"""One-dimensional layouts. "conjugate" differs from "contiguous" only for complex numbers."""

LAYOUTS = (*LINEAR, "no dimensions", "transposed", "gaps between rows", "reversed dimensions")
"""All layouts of `place`."""

_MARGIN = 3
_PATTERN = 77


@dataclass(slots=True)
class LaidOutTensor:
    """A view into a larger block of memory.

    Attributes:
        view: The tensor to pass to a call.
        whole: The whole block, as a one-dimensional tensor.

    Example:
        >>> placed = place(torch.arange(3), "offset")
        >>> isinstance(placed, LaidOutTensor), placed.guard_bytes()
        (True, False)
        >>> placed.whole[0] += 1
        >>> placed.guard_bytes()
        True
    """

    view: torch.Tensor
    whole: torch.Tensor
    _before: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._before = self.whole.clone()

    def values(self) -> torch.Tensor:
        """Return the view's elements in order: a copy on the CPU, one-dimensional and contiguous."""
        return torch.empty(self.view.numel(), dtype=self.view.dtype).copy_(self.view.detach().reshape(-1))

    def guard_bytes(self) -> bool:
        """Return whether any byte outside the view has changed since the view was created."""
        view = self.view
        inside = (view.shape, view.stride(), view.storage_offset())
        self._before.as_strided(*inside).copy_(self.whole.as_strided(*inside))
        return not torch.equal(self._before.view(torch.uint8), self.whole.view(torch.uint8))


def place(values: torch.Tensor, layout: str = "contiguous") -> LaidOutTensor:
    """Return a view that holds the given values in the given layout.

    Args:
        values: One-dimensional.
        layout: One of `LAYOUTS`; a similar layout is used if the number of elements does not allow the requested layout
            (a prime number of elements does not form a matrix).

    Raises:
        ValueError: The layout is unknown.

    Example:
        >>> placed = place(torch.arange(6), "transposed")
        >>> placed.view.shape, placed.view.is_contiguous(), placed.values().tolist()
        (torch.Size([2, 3]), False, [0, 1, 2, 3, 4, 5])
    """
    count = values.numel()
    rows = next((r for r in range(isqrt(count), 0, -1) if count % r == 0), 1)
    columns = count // rows
    flat: tuple[tuple[int, ...], tuple[int, ...]] = ((count,), (1,))
    # Shape, and strides in elements.
    geometries = {
        "contiguous": flat,
        "conjugate": flat,
        "no dimensions": ((), ()) if count == 1 else flat,
        "offset": flat,
        "every second": ((count,), (2,)),
        "transposed": ((rows, columns), (1, rows)),
        "gaps between rows": ((rows, columns), (columns + 1, 1)),
        "reversed dimensions": ((1, columns, rows), (7, 1, columns)),
    }
    if layout not in geometries:
        raise ValueError(f"unknown layout {layout!r}; known: {', '.join(LAYOUTS)}")
    shape, strides = geometries[layout]
    # Number of guard elements before and after the view.
    margin = 0 if layout in ("contiguous", "conjugate") else _MARGIN
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if count else 0
    # Guard elements alternate, so that a stray write of either bool value changes some of them.
    whole = torch.zeros(extent + 2 * margin, dtype=values.dtype, device=values.device)
    whole[::2] = _PATTERN
    view = whole.as_strided(shape, strides, margin)
    if layout == "conjugate" and values.is_complex():
        view = view.conj()
    view.copy_(values.view(shape))
    return LaidOutTensor(view, whole)
