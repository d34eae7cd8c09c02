"""Eight signs in a byte, and back: without a loop, and without a temporary of more than a byte a sign."""

from __future__ import annotations

from functools import lru_cache

import torch

__all__ = ["pack_signs", "unpack_signs"]

_GATHER = 0x0102040810204080
"""Times eight bytes of 0 or 1 as one integer: the highest byte of the product has each of them as a bit."""


def pack_signs(values: torch.Tensor) -> torch.Tensor:
    """A bit for each value, 1 where it is not negative: uint8, an eighth of the length.

    Args:
        values: One-dimensional, contiguous, a multiple of 8.

    Example:
        >>> pack_signs(torch.tensor([1.0, -1.0, 0.0, -1.0, -1.0, -1.0, -1.0, 2.0]))
        tensor([133], dtype=torch.uint8)
    """
    eights = (values >= 0).view(torch.int64)
    return ((eights * _GATHER) >> 56).to(torch.uint8)


def unpack_signs(packed: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write 1 for each bit that is set, and -1 for the others, to `out`, and return that.

    Args:
        packed: One-dimensional, uint8.
        out: One-dimensional and contiguous, eight times as long, of a floating-point dtype.

    Example:
        >>> unpack_signs(torch.tensor([133], dtype=torch.uint8), torch.empty(8))
        tensor([ 1., -1.,  1., -1., -1., -1., -1.,  1.])
    """
    torch.index_select(_table(out.dtype, out.device), 0, packed.to(torch.int32), out=out.view(-1, 8))
    return out


@lru_cache(maxsize=16)
def _table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The signs of each byte."""
    bits = torch.arange(256, device=device).unsqueeze(1) >> torch.arange(8, device=device) & 1
    return (2 * bits - 1).to(dtype)
