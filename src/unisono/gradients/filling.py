"""Which gradients of a bucket have come. There are a few microseconds for each."""

from __future__ import annotations

import torch

from unisono.compiled import compiled

__all__ = ["Filling"]


@compiled
class Filling:
    """The part of a bucket that is in haste; src/compiled/filling.c does the same.

    A class that derives from it brings `take_by_torch` and `add`; it is no ABC, since the compiled one cannot be.

    Args:
        parameters: Whose gradients these are.
        places: Where each of them belongs, of the same dtype, shape and order of memory.
        chunk: When so many bytes have come they are taken.
        plain: Whether gradients may be copied as they are. Then what is compiled copies those that it can, and sooner.
        past: Whether it writes them past the caches.
        within: From which address to which these are. Gradients that lie there, but not in their places, are left to
            torch.

    Attributes:
        came, inside: A byte for each: whether it has come, and whether it lies in its place.
        missing: How many have not come yet.
        started: Whether the bucket is being reduced, or has been.
        late: Whether a gradient came again after that.
    """

    def __init__(
        self,
        parameters: tuple[torch.Tensor, ...],
        places: tuple[torch.Tensor, ...],
        chunk: int,
        plain: bool,
        past: bool,
        within: tuple[int, int] = (0, 0),
    ) -> None:
        if len(parameters) != len(places):
            raise ValueError("each parameter has one place")
        self._nbytes, self._chunk = [p.nbytes for p in parameters], chunk
        self.came, self.inside = bytearray(len(parameters)), bytearray(len(parameters))
        self.forget()

    def forget(self) -> None:
        """Nothing has come."""
        count = len(self._nbytes)
        self.came[:], self.inside[:] = bytes(count), bytes(count)
        self._waiting: list[int] = []
        self._waiting_bytes = 0
        self.missing = count
        self.started = self.late = False

    def arrived(self, slot: int) -> bool:
        """A gradient has come to `p.grad`: the first time, or again with more of it; whether the bucket is full now."""
        if not 0 <= slot < len(self.came):
            raise IndexError("there is no such slot")
        if self.started:
            self.late = True
            return False
        if not self.came[slot]:
            self.came[slot] = True
            self.missing -= 1
            self._waiting.append(slot)
            self._waiting_bytes += self._nbytes[slot]
            if self._waiting_bytes >= self._chunk:
                self.take(self._waiting)
        elif self.inside[slot]:
            self.add(slot)
        return not self.missing

    def take(self, slots: list[int]) -> None:
        """Take gradients off their parameters, and put them where they belong; nothing waits any more."""
        self._waiting, self._waiting_bytes = [], 0
        self.take_by_torch(slots)

    def take_by_torch(self, slots: list[int]) -> None:
        """As `take`, for any gradients; those that are not there are left out. Sets `inside`."""
        raise NotImplementedError

    def add(self, slot: int) -> None:
        """More has come of a gradient that is inside."""
        raise NotImplementedError
