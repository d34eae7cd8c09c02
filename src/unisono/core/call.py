"""One rank's collective, and the fields that ranks compare before any data moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import xxhash

from unisono.core.flight_recorder import Place, site_text
from unisono.core.types import PointToPoint, ReduceOp

if TYPE_CHECKING:
    import torch

    from unisono.core.staging import Staging

__all__ = [
    "MAY_BE_WRONG",
    "NATIVE",
    "NOTHING_SENT",
    "Agreed",
    "Call",
    "Fingerprint",
    "Steps",
    "call_text",
    "disagreement",
    "explain",
    "hash_of",
]

NATIVE = "native"
"""Algorithm name of a call that the transport's native collective performs."""

NOTHING_SENT = "Nothing was sent"
"""Last sentence of the error text for a mismatch that was found before the collective ran."""

MAY_BE_WRONG = "Its result, and all that follows from it, may be wrong"
"""Last sentence of the error text for a mismatch that was found while the collective ran."""


class Agreed(NamedTuple):
    """A value that should be equal on all ranks.

    Attributes:
        name: Name passed to `agree`.
        digest: Hash of the whole value.
        parts: Path, digest and description of each element of the value.
        site: Source line of the `agree` call.
    """

    name: str
    digest: int
    parts: tuple[tuple[str, int, str], ...]
    site: str


class Fingerprint(NamedTuple):
    """Description of a collective, which all ranks compare before any data moves.

    Ranks compare all fields up to and including `agreed`, and match each rank's `sends` with the other ranks'
    `receives`. The remaining fields are only for error messages: ranks may call the collective from different lines,
    with different shapes.

    Attributes:
        call: Sequence number of the call among the group's collectives.
        operation: Name of the method of `Communicator`.
        counts: Element counts, if ranks must agree on them.
        adjoint_of: In a backward pass, the number of the collective whose gradients this collective moves.
        agreed: For an "agree" call, the names and digests of the values that should be equal on all ranks.
        sends, receives: Element counts to and from each rank, if they differ by rank (all_to_all): the count that rank
            a sends to rank b must equal the count that b receives from a.
        parts: Elements of the `agreed` values, for error messages.
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
    agreed: tuple[tuple[str, int], ...] = ()
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()
    shape: tuple[int, ...] | None = None
    parts: tuple[Agreed, ...] = ()
    site: Place = None

    def compared(self, *, shapes: bool = False) -> tuple[Any, ...]:
        """Return the values that must be equal on all ranks; `shapes` adds the shape of the tensor."""
        values = self[: len(_COMPARED)]
        return (*values, self.shape if len(self.counts) == 1 else None) if shapes else values

    def values(self) -> tuple[Any, ...]:
        """All fields as values to send; `Fingerprint(*values)` rebuilds the fingerprint on another rank."""
        return (*self[:-1], site_text(self.site))

    def __str__(self) -> str:
        """The arguments of the collective as text."""
        root = None if self.root is None else f"root {self.root}"
        shape = None if self.shape is None else str(self.shape)
        return ", ".join(filter(None, (self.op, self.dtype, shape, root)))


_COMPARED = Fingerprint._fields[: Fingerprint._fields.index("sends")]


class Steps(Protocol):
    """Performs a collective by exchanging messages."""

    def __call__(self, transport: PointToPoint, call: Call, deadline: float) -> None:
        """Perform this rank's share of the collective; raise an error after the deadline."""


class Call(NamedTuple):
    """One rank's collective, as transports, wrappers and recorders see it.

    A `Call` is created once, when a method of `Communicator` is called. All tensors are one-dimensional and contiguous.
    Contents of `inputs` and `outputs`:

    | name | inputs | outputs |
    |---|---|---|
    | all_reduce | the tensor | the same tensor |
    | reduce | a tensor that may be overwritten | the same tensor at the root, nothing elsewhere |
    | broadcast | the tensor at the root, nothing elsewhere | the tensor |
    | gather | the tensor | one per rank at the root, nothing elsewhere |
    | scatter | one per rank at the root, nothing elsewhere | the tensor |
    | all_gather | the tensor | one per rank |
    | reduce_scatter | one per rank | the tensor |
    | all_to_all | one per rank | one per rank |
    | barrier | nothing | nothing |

    Attributes:
        name: Name of the collective, from the table.
        inputs, outputs: Tensors to read and to write, as listed in the table.
        op: The reduce operation, never `avg`.
        average: Whether the sum will be divided afterwards; only used for comparison between ranks.
        root: Root of a rooted operation.
        packed: Single tensor whose consecutive slices are the per-rank inputs or outputs; None if those are separate
            tensors.
        lengths: Element count of each rank's tensor, if the tensors of a gather or scatter differ in length; otherwise
            empty.
        fingerprint: Description for comparison between ranks and for reports.
        steps: The chosen algorithm, which exchanges messages; None if the transport implements the collective itself.
        staging: Copies between the caller's tensors and this call's tensors; None for a collective that is a phase of
            another collective.
        timeout: Time limit for the whole collective in seconds.
        checked: Whether ranks compare their collectives before any of them writes to memory; False with `check="off"`.
        inference: Whether the collective was called in inference mode.
        agreed: Pending `agree` values to compare before this collective, if any.
    """

    name: str
    inputs: tuple[torch.Tensor, ...] = ()
    outputs: tuple[torch.Tensor, ...] = ()
    op: ReduceOp | None = None
    average: bool = False
    root: int | None = None
    packed: torch.Tensor | None = None
    lengths: tuple[int, ...] = ()
    fingerprint: Fingerprint = Fingerprint(0, "")
    steps: Steps | None = None
    staging: Staging = cast("Staging", None)
    timeout: float = 300.0
    checked: bool = True
    inference: bool = False
    agreed: Fingerprint | None = None


def hash_of(values: tuple[Any, ...]) -> int:
    """Return a 64-bit hash of values that ranks compare.

    Example:
        >>> hash_of(("barrier", "bor")) == hash_of(("barrier", "bor")), hash_of(("barrier",)) == hash_of(())
        (True, False)
    """
    return xxhash.xxh3_64_intdigest(repr(values).encode())


def explain(prints: Sequence[Fingerprint] | Mapping[int, Fingerprint], *, shapes: bool = False) -> str:
    """Describe a mismatch, quoting each variant and its ranks; return an empty string if all fingerprints match.

    Args:
        prints: Fingerprints of all ranks of a group, in order, or of some ranks, keyed by rank.
        shapes: Whether shapes must match as well.
    """
    sides = prints if isinstance(prints, Mapping) else dict(enumerate(prints))
    compared = [p.compared(shapes=shapes) for p in sides.values()]
    if any(value != compared[0] for value in compared):
        names = (*_COMPARED, "shape") if shapes else _COMPARED
        differing = [name for i, name in enumerate(names) if len({str(value[i]) for value in compared}) > 1]
        if differing == ["agreed"]:
            return disagreement(sides)
        if "operation" in differing:
            # If ranks called different operations, don't report the other differences, which follow from that.
            differing = ["operation"]
        elif differing != ["algorithm"]:
            # The algorithm follows from the other values, so report only the other values that differ.
            differing = [name for name in differing if name != "algorithm"]
        quoted = _sides({rank: call_text(p, algorithm="algorithm" in differing) for rank, p in sides.items()})
        text = f"ranks differ in {', '.join(differing)}: {quoted}"
        return f"{text}. All ranks must make the same calls in the same order"
    for place, (source, giver) in enumerate(sides.items()):
        for index, (target, taker) in enumerate(sides.items()):
            given = _at(giver.sends, index)
            taken = _at(taker.receives, place)
            if given != taken:
                return (
                    f"rank {source} sends {given} elements{_site(giver)} to rank {target}, which expects "
                    f"{taken}{_site(taker)}"
                )
    return ""


def disagreement(prints: Mapping[int, Fingerprint]) -> str:
    """Describe the first value passed to `agree` that differs between ranks, and its first differing element.

    Args:
        prints: Fingerprints of an "agree" call, by rank.
    """
    values = {rank: [Agreed(*each) for each in p.parts] for rank, p in prints.items()}
    for index in range(max(map(len, values.values()))):
        entries = {rank: each[index] if index < len(each) else None for rank, each in values.items()}
        if len({entry and entry[:2] for entry in entries.values()}) == 1:
            continue
        agreed = {rank: entry for rank, entry in entries.items() if entry is not None}
        if len({entry.name for entry in agreed.values()}) > 1 or len(agreed) < len(entries):
            given = {rank: f"{e.name!r} at {e.site}" if e else "nothing more" for rank, e in entries.items()}
            return f"ranks agree on different things: {_sides(given)}. All ranks must call agree in the same order"
        tables = {rank: {path: (part, text) for path, part, text in e.parts} for rank, e in agreed.items()}
        paths = sorted({path for table in tables.values() for path in table})
        path, *later = (path for path in paths if len({str(table.get(path)) for table in tables.values()}) > 1)
        for inner in later:
            # Prefer to report an element that is missing, which is more informative than the length of its container.
            kinds = {table[path][1].partition(" of ")[0] for table in tables.values() if path in table}
            if inner.startswith(path) and len(kinds) == 1:
                path = inner
        shown = {rank: table[path][1] if path in table else "not there" for rank, table in tables.items()}
        first = next(iter(agreed.values()))
        return f"ranks differ in {first.name!r}{f', at {path}' if path else ''}: {_sides(shown)} (at {first.site})"
    return ""


def _sides(texts: Mapping[int, str]) -> str:
    """Return the texts, each preceded by the ranks that share it."""
    sides: dict[str, list[int]] = {}
    for rank, text in texts.items():
        sides.setdefault(text, []).append(rank)
    return "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in sides.items())


def _at(counts: tuple[int, ...], index: int) -> int | None:
    return counts[index] if index < len(counts) else None


def call_text(p: Fingerprint, *, algorithm: bool = False) -> str:
    """Return a collective as text, with its arguments and call site.

    Example:
        >>> call_text(Fingerprint(1, "broadcast", root=0, dtype="torch.int8", counts=(4,), site="train.py:7"))
        'broadcast(torch.int8, 4 elements, root 0) at train.py:7'
    """
    if p.operation == "barrier":
        return f"barrier{_site(p)}"
    if p.agreed:
        return f"agree({', '.join(repr(name) for name, _ in p.agreed)}){_site(p)}"
    details: list[Any] = [p.op, p.dtype, p.device if p.device != "cpu" else None]
    details += [f"{' + '.join(map(str, p.counts[:4]))} elements" if p.counts else None]
    details += [f"shape {tuple(p.shape)}" if p.shape is not None else None]
    details += [f"root {p.root}" if p.root is not None else None]
    details += [f"algorithm {p.algorithm}" if p.algorithm and algorithm else None]
    details += [f"adjoint of call {p.adjoint_of}" if p.adjoint_of is not None else None]
    return f"{p.operation}({', '.join(str(d) for d in details if d is not None)}){_site(p)}"


def _site(p: Fingerprint) -> str:
    site = site_text(p.site)
    return f" at {site}" if site else ""


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
