"""The description of every collective: which ranks contribute, which receive, and how contributions are divided.

Everything that other modules know about a collective is derived from its entry in `COLLECTIVES`: argument checks, the
`Call`, the values that ranks compare, native calls, the initial and final state of algorithms, the results that the
test kit expects, and the bytes that benchmarks count. To add a collective, add an entry here and a method to
`Communicator`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

__all__ = ["COLLECTIVES", "FAMILIES", "Collective", "family_of", "header_of"]


@dataclass(frozen=True, slots=True)
class Collective:
    """Description of one collective.

    The result of rank r consists of one contribution from each contributing rank: that rank's whole tensor, or part r
    of it if the collective scatters. The contributions are reduced to one tensor, or, if the collective gathers, kept
    separate, one per rank. A collective that neither scatters nor gathers works in place.

    Attributes:
        name: Method of `Communicator`.
        family: Name of the collective that supplies the algorithms and native implementations: its own name, unless
            it is a variant of another collective.
        root: Name of the argument for the root: "src" if only that rank contributes, "dst" if only that rank receives.
        reduces: Whether contributions are reduced to one tensor.
        scatters: Whether a contribution has one part per rank.
        gathers: Whether a result has one part from each rank.
        packed: Whether the parts are consecutive slices of one tensor rather than a list of tensors.
        output: Name of the argument that is written; it is also read if the collective works in place.
        input: Name of the argument that is read.
        returns: Whether the method allocates and returns the output, because its lengths are not known in advance.
        moves: Whether the collective moves tensors; a barrier doesn't.
        in_place: Whether one tensor is both contribution and result.
        pairwise: Whether lengths may differ between pairs of ranks.
        uneven: Whether parts may differ in length.
        same_everywhere: Whether all ranks end up with the same elements.
    """

    name: str
    family: str
    root: Literal["src", "dst"] | None = None
    reduces: bool = False
    scatters: bool = False
    gathers: bool = False
    packed: bool = False
    output: str = "tensor"
    input: str = "tensor"
    returns: bool = False

    moves: bool = field(init=False)
    in_place: bool = field(init=False)
    pairwise: bool = field(init=False)
    uneven: bool = field(init=False)
    same_everywhere: bool = field(init=False)

    def __post_init__(self) -> None:
        many = self.scatters or self.gathers
        pairwise = self.scatters and self.gathers
        moves = bool(self.output)
        derived = {
            "moves": moves,
            "in_place": not many,
            "pairwise": pairwise,
            "uneven": self.returns or (many and self.root is None and (pairwise or not self.packed)),
            "same_everywhere": moves and self.root != "dst" and not self.scatters,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def contributes(self, rank: int, root: int) -> bool:
        """Return whether a rank's tensors are read."""
        return self.root != "src" or rank == root

    def receives(self, rank: int, root: int) -> bool:
        """Return whether a rank receives a result."""
        return self.root != "dst" or rank == root

    def writes(self, rank: int, root: int) -> bool:
        """Return whether a rank's output changes; in a broadcast, the root's does not."""
        if self.root is None or (self.root == "src" and not self.in_place):
            return True
        return (rank == root) == (self.root == "dst")

    def sources(self, rank: int, size: int, root: int) -> list[tuple[int, int]]:
        """Contributions to a rank's result: for each, the contributing rank and the index of its part.

        Example:
            >>> COLLECTIVES["scatter"].sources(rank=2, size=3, root=1)
            [(1, 2)]
            >>> COLLECTIVES["gather"].sources(rank=0, size=3, root=0)
            [(0, 0), (1, 0), (2, 0)]
        """
        if not self.receives(rank, root):
            return []
        part = rank if self.scatters else 0
        return [(source, part) for source in range(size) if self.contributes(source, root)]

    def compared_counts(self, read: Sequence[int], written: Sequence[int]) -> tuple[int, ...]:
        """Element counts that must be equal on all ranks; empty if they are compared between pairs of ranks.

        Args:
            read, written: Element counts of the tensors that one rank reads and writes.
        """
        if self.pairwise:
            return ()
        if self.root is not None:
            return tuple((read or written)[:1])
        return tuple(read if self.scatters else written)

    def arguments(self, output: Any, input: Any, op: object = None, root: int | None = None) -> dict[str, Any]:
        """Keyword arguments of the method.

        Example:
            >>> COLLECTIVES["reduce"].arguments("t", None, "sum", 3)
            {'tensor': 't', 'dst': 3, 'op': 'sum'}
        """
        found: dict[str, Any] = {}
        if self.moves and not self.in_place:
            found[self.input] = input
        if self.moves and not self.returns:
            found[self.output] = output
        if self.root is not None:
            found[self.root] = root
        if self.reduces:
            found["op"] = op
        return found


def _packed(whole: Collective) -> Collective:
    return replace(whole, name=f"{whole.name}_single", packed=True, output="output", input="input")


_ALL_GATHER = Collective("all_gather", "all_gather", gathers=True, output="tensor_list")
_ALL_TO_ALL = Collective(
    "all_to_all", "all_to_all", scatters=True, gathers=True, output="output_list", input="input_list"
)
_GATHER = Collective("gather", "gather", root="dst", gathers=True, output="gather_list")
_SCATTER = Collective("scatter", "scatter", root="src", scatters=True, input="scatter_list")
_REDUCE_SCATTER = Collective(
    "reduce_scatter", "reduce_scatter", reduces=True, scatters=True, output="output", input="input_list"
)

_ALL = (
    _ALL_GATHER,
    _packed(_ALL_GATHER),
    replace(_ALL_GATHER, name="all_gather_v", returns=True),
    Collective("all_reduce", "all_reduce", reduces=True),
    _ALL_TO_ALL,
    _packed(_ALL_TO_ALL),
    replace(_ALL_TO_ALL, name="all_to_all_v", input="tensors", returns=True),
    Collective("barrier", "barrier", output="", input=""),
    Collective("broadcast", "broadcast", root="src"),
    _GATHER,
    replace(_GATHER, name="gather_v", returns=True),
    Collective("reduce", "reduce", root="dst", reduces=True),
    _REDUCE_SCATTER,
    _packed(_REDUCE_SCATTER),
    _SCATTER,
    replace(_SCATTER, name="scatter_v", input="tensors", returns=True),
)

COLLECTIVES = {collective.name: collective for collective in _ALL}
"""All collectives, keyed by the name of their `Communicator` method."""

FAMILIES = {name: collective for name, collective in COLLECTIVES.items() if name == collective.family}
"""Collectives that have their own algorithms and native implementations."""


def header_of(collective: Collective) -> Collective:
    """Return a collective with the same name that exchanges shapes before `collective` allocates its output.

    Example:
        >>> header_of(COLLECTIVES["scatter_v"]).family
        'broadcast'
    """
    single = "all_to_all_single" if collective.pairwise else "all_gather_single"
    return replace(COLLECTIVES["broadcast" if collective.root == "src" else single], name=collective.name)


def family_of(name: str) -> Collective:
    """Return the entry of `FAMILIES` with this name; for an unknown name, raise a `ValueError` that lists all names."""
    found = FAMILIES.get(name)
    if found is None:
        raise ValueError(f"unknown collective {name!r}; known: {', '.join(FAMILIES)}")
    return found
