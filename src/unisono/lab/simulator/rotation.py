"""Symbolic rank, by which a file's steps are evaluated once for all ranks, where these do alike up to rotation."""

from __future__ import annotations

from typing import Any

__all__ = ["Rotation"]


class Rotation:
    """Any rank r of a group, or a number computed from it: (r + shift) mod size, times scale, plus offset.

    Sums with integers, products with positive integers, and remainders by size times scale are such numbers again.
    Everything else, such as a comparison, raises TypeError: there the steps depend on the rank in another way.

    Args:
        size: Number of ranks.
        shift, scale, offset: Integers.

    Example:
        >>> (Rotation(8) - 3) % 8
        Rotation(size=8, shift=5, scale=1, offset=0)
        >>> Rotation(8) ^ 1
        Traceback (most recent call last):
        ...
        TypeError: unsupported operand type(s) for ^: 'Rotation' and 'int'
    """

    __slots__ = ("offset", "scale", "shift", "size")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, size: int, shift: int = 0, scale: int = 1, offset: int = 0) -> None:
        self.size, self.shift, self.scale, self.offset = size, shift, scale, offset

    def __repr__(self) -> str:
        return f"Rotation(size={self.size}, shift={self.shift}, scale={self.scale}, offset={self.offset})"

    def __add__(self, other: int) -> Rotation:
        if not isinstance(other, int):
            return NotImplemented
        return Rotation(self.size, self.shift, self.scale, self.offset + other)

    __radd__ = __add__

    def __sub__(self, other: int) -> Rotation:
        return self + -other if isinstance(other, int) else NotImplemented

    def __mul__(self, other: int) -> Rotation:
        if not isinstance(other, int) or other < 1:
            return NotImplemented
        return Rotation(self.size, self.shift, self.scale * other, self.offset * other)

    __rmul__ = __mul__

    def __mod__(self, other: int) -> Rotation:
        if other != self.size * self.scale:
            return NotImplemented
        whole, offset = divmod(self.offset, self.scale)
        return Rotation(self.size, (self.shift + whole) % self.size, self.scale, offset)

    def __eq__(self, other: object) -> Any:
        raise TypeError("a symbolic rank cannot be compared")

    def __bool__(self) -> bool:
        raise TypeError("a symbolic rank is neither true nor false")
