"""Calls on plain tensors as they pass the door: what the façade's plans make of them, at once and without a copy.

Each function takes what calls of one kind have in common, and tells how their tensors are laid out; None for what is
wrong, or needs more. Those go the longer way, which says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from unisono.transports._plain import Key
from unisono.types import Call, ReduceOp

__all__ = ["FORMS", "Form"]

_Flats = Sequence[torch.Tensor]


class Form(NamedTuple):
    """How calls of one kind are made.

    Attributes:
        call: The name by which they pass the door.
        sides: From what is written and what is read, inputs and outputs as of `Call`; None if they share memory.
        counts: Elements that all ranks agree on.
        sends, receives: Elements to and from each rank, where they agree by pairs.
    """

    call: str
    sides: Callable[[Any, Any], tuple[_Flats, _Flats] | None]
    counts: tuple[int, ...]
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()

    def made(self, sides: tuple[_Flats, _Flats], op: ReduceOp | None, root: int | None, *, averages: bool) -> Call:
        """The call as it passes the door."""
        given, written = sides
        return Call(name=self.call, inputs=tuple(given), outputs=tuple(written), op=op, average=averages, root=root)


def _broadcast(key: Key, rank: int, size: int) -> Form:
    here = rank == key[2]

    def sides(target: Any, _: Any) -> tuple[_Flats, _Flats] | None:
        flats = (_flat(target),)
        return (flats, flats) if here else ((), flats)

    return Form("broadcast", sides, key[4])


def _reduce(key: Key, rank: int, size: int) -> Form:
    here = rank == key[2]

    def sides(target: Any, _: Any) -> tuple[_Flats, _Flats] | None:
        flats = (_flat(target),)
        return (flats, flats) if here else (flats, ())

    return Form("reduce", sides, key[4])


def _all_gather(key: Key, rank: int, size: int) -> Form | None:
    *_, targets, sources = key
    fits = len(targets) == size and sources == targets[rank : rank + 1]
    return Form("all_gather", lambda t, s: _collected(_flats(t), s, rank), targets) if fits else None


def _all_gather_single(key: Key, rank: int, size: int) -> Form | None:
    *_, targets, (count,) = key
    fits = targets == (count * size,)
    return (
        Form("all_gather", lambda t, s: _collected(_flat(t).split(count), s, rank), (count,) * size) if fits else None
    )


def _gather(key: Key, rank: int, size: int) -> Form | None:
    *_, targets, sources = key
    if targets != (sources * size if rank == key[2] else ()):
        return None
    return Form("gather", lambda t, s: _collected(_flats(t), s, rank) if t else ((_flat(s),), ()), sources)


def _collected(targets: _Flats, source: torch.Tensor, rank: int) -> tuple[_Flats, _Flats] | None:
    read = (_flat(source),)
    here = targets[rank].data_ptr() == source.data_ptr()
    return (read, targets) if _apart(targets, () if here else read) else None


def _scatter(key: Key, rank: int, size: int) -> Form | None:
    *_, targets, sources = key
    if sources != (targets * size if rank == key[2] else ()):
        return None

    def sides(target: Any, source: Any) -> tuple[_Flats, _Flats] | None:
        read, written = _flats(source or ()), (_flat(target),)
        others = [t for r, t in enumerate(read) if r != rank or t.data_ptr() != target.data_ptr()]
        return (read, written) if _apart(written, others) else None

    return Form("scatter", sides, targets)


def _reduce_scatter(key: Key, rank: int, size: int) -> Form | None:
    *_, targets, sources = key
    fits = len(sources) == size and targets == sources[rank : rank + 1]
    return Form("reduce_scatter", lambda t, s: _between((_flat(t),), _flats(s)), sources) if fits else None


def _reduce_scatter_single(key: Key, rank: int, size: int) -> Form | None:
    *_, (count,), sources = key
    if sources != (count * size,):
        return None
    return Form("reduce_scatter", lambda t, s: _between((_flat(t),), _flat(s).split(count)), (count,) * size)


def _all_to_all(key: Key, rank: int, size: int) -> Form | None:
    *_, targets, sources = key
    if not len(targets) == len(sources) == size or targets[rank] != sources[rank]:
        return None
    return Form("all_to_all", lambda t, s: _between(_flats(t), _flats(s)), (), sources, targets)


def _all_to_all_single(key: Key, rank: int, size: int) -> Form | None:
    *_, targets, sources = key
    count = sources[0] // size
    if targets != sources or count * size != sources[0]:
        return None

    def sides(target: Any, source: Any) -> tuple[_Flats, _Flats] | None:
        # It is rows that are given and taken.
        if any(not t.dim() or t.shape[0] % size for t in (target, source)):
            return None
        return _between(_flat(target).split(count), _flat(source).split(count))

    return Form("all_to_all", sides, (), (count,) * size, (count,) * size)


def _between(written: _Flats, read: _Flats) -> tuple[_Flats, _Flats] | None:
    return (read, written) if _apart(written, read) else None


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    # Of stride 1 also where there is one element.
    return tensor.as_strided((tensor.numel(),), (1,))


def _flats(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [_flat(tensor) for tensor in tensors]


def _apart(written: _Flats, read: _Flats) -> bool:
    """Whether none of those that are written shares memory with another one."""
    spans = [(t.data_ptr(), t.nbytes, True) for t in written] + [(t.data_ptr(), t.nbytes, False) for t in read]
    spans.sort()
    end_of_any = end_of_written = 0
    for start, nbytes, writes in spans:
        if nbytes and start < (end_of_any if writes else end_of_written):
            return False
        end_of_any = max(end_of_any, start + nbytes)
        if writes:
            end_of_written = max(end_of_written, start + nbytes)
    return True


FORMS: dict[str, Callable[[Key, int, int], Form | None]] = {
    "all_gather": _all_gather,
    "all_gather_single": _all_gather_single,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "broadcast": _broadcast,
    "gather": _gather,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "scatter": _scatter,
}
"""By names of the communicator's methods."""
