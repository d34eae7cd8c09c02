"""Lists of tensors, one a rank, as MPI takes them on the shorter way: where they lie, with no copy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from unisono.transports._mpi_comms import Comms
from unisono.transports._mpi_parts import LONGEST

__all__ = ["Parts", "levelled", "places_of", "touch"]

_DESCRIBED = 4
"""A buffer, the lengths of its parts, their places in it, and the kind of element."""


class Parts:
    """Tensors of given lengths, one a rank, as MPI takes them: as they lie, from the first to the last.

    Args:
        comms: Of the ranks.
        dtype: Of all of them.
        counts: Elements of each.
    """

    def __init__(self, comms: Comms, dtype: torch.dtype, counts: tuple[int, ...]) -> None:
        self._mpi, self._rank = comms.mpi, comms.own.Get_rank()
        self._sizes = [count * dtype.itemsize for count in counts]
        self._close = [0, *accumulate(self._sizes[:-1])]
        self._some_empty = not all(self._sizes)

    def described(self, tensors: Sequence[torch.Tensor], own: torch.Tensor | None = None) -> Any:
        """None if some share memory, or lie too far apart; or if `own` touches them, but in this rank's place."""
        sizes, addresses = self._sizes, [tensor.data_ptr() for tensor in tensors]
        if self._some_empty:
            # Those lie anywhere, most often at 0.
            low = min((at for at, nbytes in zip(addresses, sizes, strict=True) if nbytes), default=0)
            addresses = [at if nbytes else low for at, nbytes in zip(addresses, sizes, strict=True)]
        first = addresses[0]
        places = [at - first for at in addresses]
        extent = self._close[-1] + sizes[-1]
        if places != self._close:
            spans = sorted(zip(places, sizes, strict=True))
            if any(place + nbytes > after for (place, nbytes), (after, _) in pairwise(spans)):
                return None
            low = spans[0][0]
            first, extent, places = first + low, sum(spans[-1]) - low, [place - low for place in places]
            if extent > LONGEST:
                return None
        if own is not None and own.data_ptr() - first != places[self._rank]:
            ahead, behind = own.data_ptr() - first, own.data_ptr() - first + own.nbytes
            if any(ahead < place + nbytes and place < behind for place, nbytes in zip(places, sizes, strict=True)):
                return None
        return [self._mpi.buffer.fromaddress(first, extent), sizes, places, self._mpi.BYTE]


def levelled(arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Arguments of MPI with no lengths and places of parts; None if these are not of one length, side by side."""
    found = []
    for argument in arguments:
        if isinstance(argument, list) and len(argument) == _DESCRIBED:
            buffer, sizes, places, kind = argument
            if len(set(sizes)) > 1 or places != [sizes[0] * rank for rank in range(len(sizes))]:
                return None
            found.append([buffer, kind])
        else:
            found.append(argument)
    return tuple(found)


def places_of(described: Sequence[Any], size: int) -> list[int] | None:
    """The addresses of parts of one length, as MPI is told of them; None if they are of several lengths."""
    first = described[0].address
    if len(described) < _DESCRIBED:
        nbytes = described[0].nbytes // size
        return [first + rank * nbytes for rank in range(size)]
    _, sizes, places, _ = described
    return None if len(set(sizes)) > 1 else [first + place for place in places]


def touch(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    ahead = other.data_ptr() - one.data_ptr()
    return -other.nbytes < ahead < one.nbytes
