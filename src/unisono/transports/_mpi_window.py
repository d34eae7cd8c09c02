"""Collectives by which the ranks of one host read each other's memory: as MPI does it, but for its handshakes.

All ranks have come to the call, so each shows the others where to read, and they read. src/compiled/window.c does it,
by pieces that are told here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from unisono.transports._mpi_lists import levelled, places_of

__all__ = ["LEAST", "PLANS", "Level", "Near", "Window", "level_by"]

LEAST = 1 << 12
"""Bytes of each part from which it is faster. Less than that, MPI sends at once, without a handshake."""

_MOST = {"broadcast": 1 << 22, "gather": 1 << 22}
"""Bytes of each part above which it is no more: only one rank reads, or is read, and MPI cuts what is long."""

_UNCROWDED = frozenset({"gather", "scatter"})
"""Those that are slower where ranks outnumber processors: all ranks wait for each other, and MPI's do not."""

_SHOW, _TAKE, _COPY = range(3)
_PIECE = struct.Struct("=5q")

_Arguments = tuple[Any, ...]
_Piece = tuple[int, int, int, int, int]
"""What is done; with which rank; an address; how many bytes; of a copy, from where."""


class Window(NamedTuple):
    """By which ranks read each other's memory.

    Attributes:
        move: Does what pieces tell, on all ranks at once.
        crowded: Whether ranks outnumber processors; the same on all ranks.
    """

    move: Callable[[bytes], object]
    crowded: bool

    def serves(self, name: str, nbytes: int) -> bool:
        """Whether it is the faster way for parts of this length."""
        return LEAST <= nbytes <= _MOST.get(name, nbytes) and not (self.crowded and name in _UNCROWDED)


class Near(NamedTuple):
    """What ranks of one host have beside MPI.

    Attributes:
        window: By which they read each other's memory, if they may.
        add: Makes the sum that bytes tell of, on all ranks at once, in memory that they share.
    """

    window: Window | None = None
    add: Callable[[bytes], object] | None = None


class Level(NamedTuple):
    """How calls are made where all ranks' parts are of one length.

    Attributes:
        begin: What makes them.
        simpler: Its arguments, from those of MPI's call for any parts; None if these parts are not fit for it.
    """

    begin: Callable[..., object]
    simpler: Callable[[_Arguments], _Arguments | None]


def level_by(name: str, kind: Any, nbytes: int, begin: Callable[..., object] | None) -> Level | None:
    """By reading each other's memory where that is faster; else by MPI's call for such parts, if there is one.

    Args:
        name: Of one of the `PLANS`.
        kind: The calls', as `Kind`.
        nbytes: Of a part; the same on all ranks if it is so made.
        begin: MPI's call, if there is one.
    """
    window: Window | None = kind.near.window
    if window is not None and window.serves(name, nbytes):
        return Level(window.move, partial(PLANS[name], kind.rank, kind.size))
    return None if begin is None else Level(begin, levelled)


def _all_gather(rank: int, size: int, arguments: _Arguments) -> tuple[bytes] | None:
    (source, *_), into = arguments
    targets, nbytes = places_of(into, size), source.nbytes
    if targets is None:
        return None
    shown = [(_SHOW, other, source.address, nbytes, 0) for other in _others(rank, size)]
    taken = [(_TAKE, other, targets[other], nbytes, 0) for other in _others(rank, size)]
    return _packed([*shown, *taken, (_COPY, rank, targets[rank], nbytes, source.address)])


def _all_to_all(rank: int, size: int, arguments: _Arguments) -> tuple[bytes] | None:
    sources, targets = (places_of(argument, size) for argument in arguments)
    if sources is None or targets is None:
        return None
    nbytes = _length(arguments[0], size)
    shown = [(_SHOW, other, sources[other], nbytes, 0) for other in _others(rank, size)]
    taken = [(_TAKE, other, targets[other], nbytes, 0) for other in _others(rank, size)]
    return _packed([*shown, *taken, (_COPY, rank, targets[rank], nbytes, sources[rank])])


def _broadcast(rank: int, size: int, arguments: _Arguments) -> tuple[bytes]:
    (tensor, *_), root = arguments
    if rank != root:
        return _packed([(_TAKE, root, tensor.address, tensor.nbytes, 0)])
    return _packed([(_SHOW, other, tensor.address, tensor.nbytes, 0) for other in _others(rank, size)])


def _gather(rank: int, size: int, arguments: _Arguments) -> tuple[bytes] | None:
    given, into, root = arguments
    if rank != root:
        return _packed([(_SHOW, root, given[0].address, given[0].nbytes, 0)])
    targets, nbytes = places_of(into, size), _length(into, size)
    if targets is None:
        return None
    pieces = [(_TAKE, other, targets[other], nbytes, 0) for other in _others(rank, size)]
    if isinstance(given, list):
        pieces.append((_COPY, rank, targets[rank], nbytes, given[0].address))
    return _packed(pieces)


def _scatter(rank: int, size: int, arguments: _Arguments) -> tuple[bytes]:
    """From the arguments of `deal` and `take`."""
    if isinstance(arguments[1], int):
        (target, _), root = arguments
        return _packed([(_TAKE, root, target.address, target.nbytes, 0)])
    parts, copied = arguments
    pieces = [(_SHOW, other, part[0].address, part[0].nbytes, 0) for part, other in parts]
    if copied is not None:
        target, source, nbytes = copied
        pieces.append((_COPY, rank, target, nbytes, source))
    return _packed(pieces)


def _others(rank: int, size: int) -> list[int]:
    """In another order on each rank."""
    return [(rank + step) % size for step in range(1, size)]


def _length(described: Sequence[Any], size: int) -> int:
    """Bytes of each part of what MPI is told of."""
    nbytes: int = described[1][0] if isinstance(described[1], list) else described[0].nbytes // size
    return nbytes


def _packed(pieces: Sequence[_Piece]) -> tuple[bytes]:
    """What a window is given."""
    return (b"".join(_PIECE.pack(*piece) for piece in pieces),)


PLANS: dict[str, Callable[[int, int, _Arguments], tuple[bytes] | None]] = {
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "gather": _gather,
    "scatter": _scatter,
}
