"""Fingerprints that all ranks compare before a collective moves any data, and the text of a mismatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import xxhash

__all__ = ["Fingerprint", "explain", "hash_of"]

_COMPARED = ("call", "operation", "op", "root", "dtype", "counts", "device", "algorithm", "adjoint_of")
_FREE = ("sends", "receives", "shape", "site")
_compared, _all = attrgetter(*_COMPARED), attrgetter(*_COMPARED, *_FREE)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Description of a call that every rank must agree on before a collective moves any data.

    Compared between ranks: `call`, `operation`, `op`, `root`, `dtype`, `counts`, `device`, `algorithm`, `adjoint_of`.
    The other fields are for messages only: ranks may call from different lines, with different shapes.

    Attributes:
        adjoint_of: In a backward pass, the number of the call whose gradients this one moves.
        counts: Numbers of elements, where ranks must agree on them.
        sends, receives: Elements for and from each rank, where they differ by rank (all_to_all):
            what rank a sends to b must be what b receives from a.
    """

    call: int
    operation: str
    op: str | None = None
    root: int | None = None
    dtype: str | None = None
    counts: tuple[int, ...] = ()
    device: str | None = None
    algorithm: str | None = None
    adjoint_of: int | None = None
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()
    shape: tuple[int, ...] | None = None
    site: str | None = None

    def compared(self, *, shapes: bool = False) -> tuple[Any, ...]:
        """The values that must be equal on all ranks; the shape too if so wanted, where ranks' tensors are alike."""
        values: tuple[Any, ...] = _compared(self)
        return (*values, self.shape if len(self.counts) == 1 else None) if shapes else values

    def values(self) -> tuple[Any, ...]:
        """All values, from which `Fingerprint(*values)` makes an equal one."""
        values: tuple[Any, ...] = _all(self)
        return values


def hash_of(values: tuple[Any, ...]) -> int:
    """Return 64 bits that stand for values which ranks compare.

    Example:
        >>> hash_of(("barrier", "bor")) == hash_of(("barrier", "bor")), hash_of(("barrier",)) == hash_of(())
        (True, False)
    """
    return xxhash.xxh3_64_intdigest(repr(values).encode())


def explain(prints: Sequence[Fingerprint], *, shapes: bool = False) -> str:
    """Return a description of the mismatch that quotes every side; empty if all fingerprints match."""
    compared = [p.compared(shapes=shapes) for p in prints]
    if any(value != compared[0] for value in compared):
        names = (*_COMPARED, "shape") if shapes else _COMPARED
        differing = [name for i, name in enumerate(names) if len({str(value[i]) for value in compared}) > 1]
        if "operation" in differing:
            # The rest follows from it.
            differing = ["operation"]
        sides: dict[str, list[int]] = {}
        for rank, fingerprint in enumerate(prints):
            sides.setdefault(_side(fingerprint, "algorithm" in differing), []).append(rank)
        quoted = "; ".join(f"{_ranks(ranks)}: {side}" for side, ranks in sides.items())
        text = f"ranks differ in {', '.join(differing)}: {quoted}"
        return f"{text}. All ranks must make the same calls in the same order"
    for source, giver in enumerate(prints):
        for target, taker in enumerate(prints):
            given, taken = _at(giver.sends, target), _at(taker.receives, source)
            if given != taken:
                return (
                    f"rank {source} sends {given} elements{_site(giver)} to rank {target}, which expects "
                    f"{taken}{_site(taker)}"
                )
    return ""


def _at(counts: tuple[int, ...], index: int) -> int | None:
    return counts[index] if index < len(counts) else None


def _side(p: Fingerprint, with_algorithm: bool) -> str:
    if p.operation == "barrier":
        return f"barrier{_site(p)}"
    details: list[Any] = [p.op, p.dtype, p.device if p.device != "cpu" else None]
    details += [f"{' + '.join(map(str, p.counts[:4]))} elements" if p.counts else None]
    details += [f"shape {tuple(p.shape)}" if p.shape is not None else None]
    details += [f"root {p.root}" if p.root is not None else None]
    details += [f"algorithm {p.algorithm}" if p.algorithm and with_algorithm else None]
    details += [f"adjoint of call {p.adjoint_of}" if p.adjoint_of is not None else None]
    return f"{p.operation}({', '.join(str(d) for d in details if d is not None)}){_site(p)}"


def _site(p: Fingerprint) -> str:
    return f" at {p.site}" if p.site else ""


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
