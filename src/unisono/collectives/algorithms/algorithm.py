"""An algorithm for a collective: the functions in its file, and values for its options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Protocol, TypeVar

from unisono.collectives.algorithms.step import Cost, Step, elements
from unisono.core.collective import FAMILIES, family_of

__all__ = [
    "COLLECTIVES",
    "FREE_CHUNKS",
    "Algorithm",
    "AlgorithmFile",
    "balanced",
    "default_chunks",
    "goal",
    "start",
]


class AlgorithmFile(Protocol):
    """Functions that a file in `algorithms/<collective>/` defines. In rooted collectives, rank 0 is the root.

    If the caller's root is another rank, the executor renumbers the ranks. A file may also define:

    - `chunks(size)`: the number of chunks in a message; by default 1 for a barrier, 2p for an all_to_all, and p for
      other collectives. Only algorithms for all_reduce, reduce and broadcast may choose the number of chunks freely. In
      an all_to_all, each rank sends chunks 0 to p-1 and receives chunks p to 2p-1; further chunks are scratch memory.
    - `unsupported(size)`: the reason why the algorithm does not support this number of ranks, or an empty string if it
      does.
    - `SAME_BITS = False`, if ranks may get differently rounded sums; the algorithm is then used only for reductions
      that do not round.
    - `BALANCED = True`, if sums are reduced in the balanced binary tree over the ranks, for any number of ranks.
    - `UNIFORM = True`, if all parts of an all_to_all must be equally long.
    - `OPTIONS`: a dict of keyword arguments, with defaults, that all functions in the file accept (`{"segments": 1}`).

    Example:
        >>> from unisono.collectives.algorithms.all_gather import ring
        >>> [step.send for step in ring.steps(rank=0, size=3)]
        [(Move(peer=1, start=0, stop=1, further=()),), (Move(peer=1, start=2, stop=3, further=()),)]
        >>> ring.cost(size=3, numel=6)
        Cost(rounds=2, messages=2, sent=4)
    """

    def steps(self, rank: int, size: int) -> Iterator[Step]:
        """Return a rank's steps in order.

        Args:
            rank: The rank, numbered so that the root is rank 0.
            size: Number of ranks, at least 1.
        """
        ...

    def cost(self, size: int, numel: int) -> Cost:
        """Return the exact cost; `un.algorithms.verify` checks it against the steps.

        Args:
            size: Number of ranks, at least 2.
            numel: Number of elements in the message, that is, in one rank's input or output, whichever is longer.
                Chunks are nearly equal in length, with longer chunks first.
        """
        ...


@dataclass(frozen=True, slots=True)
class Algorithm:
    """Algorithm for a collective, with values for its options.

    Args:
        collective: Name of the collective.
        name: Name of the algorithm.
        file: File with the algorithm's functions.
        options: Options that differ from the file's defaults, by name.

    Example:
        >>> ring = un.algorithms.find("all_reduce", "ring")
        >>> ring.cost(size=4, numel=1000)
        Cost(rounds=6, messages=6, sent=1500)
    """

    collective: str
    name: str
    file: AlgorithmFile
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = getattr(self.file, "OPTIONS", {})
        for option in self.options:
            if option not in known:
                listed = f"known: {', '.join(known)}" if known else "it has none"
                raise ValueError(f"the {self.collective} algorithm {self.name!r} has no option {option!r}; {listed}")

    @property
    def same_bits(self) -> bool:
        """Whether all ranks get bit-identical results, even if sums are rounded."""
        return bool(getattr(self.file, "SAME_BITS", True))

    @property
    def balanced(self) -> bool:
        """Whether sums are reduced in the balanced binary tree over the ranks, for any number of ranks."""
        return bool(getattr(self.file, "BALANCED", False))

    @property
    def uniform(self) -> bool:
        """Whether all parts of an all_to_all must be equally long."""
        return bool(getattr(self.file, "UNIFORM", False))

    @property
    def label(self) -> str:
        """Name and options in the format of `find`, such as "double_binary_tree:segments=8"."""
        values = (
            f"{option}={'x'.join(map(str, value)) if isinstance(value, tuple) else value}"
            for option, value in self.options.items()
        )
        return ":".join((self.name, *values))

    def parse_options(self, pairs: Iterable[str]) -> dict[str, Any]:
        """Return options parsed from strings such as "segments=8" and "levels=8x128".

        Args:
            pairs: One string per option.

        Raises:
            ValueError: A string is not an option of this algorithm.

        Example:
            >>> un.algorithms.find("all_reduce", "hierarchical").parse_options(["levels=8x128"])
            {'levels': (8, 128)}
        """
        known: Mapping[str, Any] = getattr(self.file, "OPTIONS", {})
        found: dict[str, Any] = {}
        for pair in pairs:
            option, _, text = pair.partition("=")
            numbers = text.split("x")
            several = isinstance(known.get(option), tuple)
            if not all(number.isdecimal() for number in numbers) or (len(numbers) > 1 and not several):
                form = f"{option or 'option'}={'8x128' if several else '8'}"
                raise ValueError(f"{pair!r} is no option of {self.name!r}; write {form}, in whole numbers")
            found[option] = tuple(map(int, numbers)) if several else int(text)
        return found

    def with_options(self, **options: Any) -> Algorithm:
        """Return this algorithm with different options.

        Args:
            options: New values of options, by name; other options keep their values.

        Example:
            >>> un.algorithms.find("all_reduce", "ring").with_options().name
            'ring'
        """
        return replace(self, options={**self.options, **options})

    def unsupported(self, size: int) -> str:
        """Return why the algorithm does not support a number of ranks, or an empty string if it does.

        Args:
            size: Number of ranks, at least 1.

        Example:
            >>> un.algorithms.find("all_reduce", "ring").unsupported(size=3)
            ''
        """
        check: Callable[..., str] | None = getattr(self.file, "unsupported", None)
        reason = check(size, **self.options) if check and size > 1 else ""
        return f"the {self.collective} algorithm {self.name!r} {reason}" if reason else ""

    def serves(self, size: int, *, rounded: bool = True, uneven: bool = True, balanced: bool = False) -> bool:
        """Return whether the algorithm supports a call with the given properties.

        Args:
            size: Number of ranks, at least 1.
            rounded: Whether the call adds or multiplies floating-point numbers.
            uneven: Whether the parts of a message may differ in length.
            balanced: Whether sums must be reduced in the balanced binary tree over the ranks.

        Example:
            >>> un.algorithms.find("all_reduce", "ring").serves(size=3, balanced=True)
            False
        """
        exact = (self.same_bits or not rounded) and not (self.uniform and uneven) and (self.balanced or not balanced)
        return exact and not self.unsupported(size)

    def chunks(self, size: int) -> int:
        """Return the number of chunks in a message.

        Args:
            size: Number of ranks, at least 1.

        Example:
            >>> un.algorithms.find("all_to_all", "pairwise").chunks(size=3)
            6
        """
        chunks: Callable[..., int] | None = getattr(self.file, "chunks", None)
        return chunks(size, **self.options) if chunks else default_chunks(self.collective, size)

    def parts(self, size: int) -> int:
        """Return the number of parts in a message. A part is a chunk or, in an all_to_all, the data for one rank.

        Args:
            size: Number of ranks.

        Example:
            >>> ring = un.algorithms.find("all_reduce", "ring")
            >>> ring.parts(size=4)
            4
        """
        return size if self.collective == "all_to_all" else self.chunks(size)

    def offsets(self, size: int, nbytes: int, itemsize: int = 1) -> list[int]:
        """Return the number of bytes before each chunk, followed by the total.

        Args:
            size: Number of ranks.
            nbytes: Size of the message in bytes.
            itemsize: Size of an element in bytes; chunks contain whole elements.

        Example:
            >>> ring = un.algorithms.find("all_reduce", "ring")
            >>> ring.offsets(size=4, nbytes=40, itemsize=4)
            [0, 12, 24, 32, 40]
        """
        parts = self.parts(size)
        lengths = [elements(nbytes // itemsize, parts, part, part + 1) * itemsize for part in range(parts)]
        return [0, *accumulate(lengths[chunk % parts] for chunk in range(self.chunks(size)))]

    def steps(self, rank: int, size: int) -> Iterator[Step]:
        """Return a rank's steps in order; no steps if the group has only one rank.

        Args:
            rank: The rank, numbered so that the root is rank 0.
            size: Number of ranks, at least 1.

        Example:
            >>> len(list(un.algorithms.find("all_reduce", "ring").steps(rank=0, size=4)))
            6
        """
        return self.file.steps(rank, size, **self.options) if size > 1 else iter(())

    def cost(self, size: int, numel: int) -> Cost:
        """Return the exact cost for a message.

        Args:
            size: Number of ranks, at least 1.
            numel: Number of elements in the message.

        Example:
            >>> un.algorithms.find("broadcast", "binomial").cost(size=8, numel=100)
            Cost(rounds=3, messages=3, sent=300)
        """
        return self.file.cost(size, numel, **self.options) if size > 1 else Cost(0, 0, 0)


T = TypeVar("T")

COLLECTIVES = tuple(FAMILIES)

FREE_CHUNKS = frozenset({"all_reduce", "broadcast", "reduce"})
"""Collectives whose algorithms may choose the number of chunks freely."""


def start(collective: str, rank: int, chunk: int, size: int) -> int:
    """Return a bit mask of the contributions that a rank's chunk contains before the first step; 0 for an empty chunk.

    Example:
        >>> [start("all_gather", rank=1, chunk=chunk, size=3) for chunk in range(3)]
        [0, 2, 0]
    """
    family = family_of(collective)
    mine = 1 << rank
    if not family.contributes(rank, root=0):
        return 0
    if family.pairwise:
        part = rank if chunk == size + rank else chunk
        return 1 << (rank * size + part) if part < size else 0
    return mine if chunk == rank or not family.gathers else 0


def goal(collective: str, rank: int, chunk: int, size: int) -> int:
    """Return a bit mask of the contributions that a rank's chunk must contain at the end; 0 if any will do.

    Example:
        >>> [goal("reduce_scatter", rank=1, chunk=chunk, size=3) for chunk in range(3)]
        [0, 7, 0]
    """
    family = family_of(collective)
    everyone = (1 << size) - 1
    if family.pairwise:
        return 1 << ((chunk - size) * size + rank) if size <= chunk < 2 * size else 0
    if not family.receives(rank, root=0) or (family.scatters and chunk != rank):
        return 0
    if family.gathers:
        return 1 << chunk
    return everyone if family.reduces or not family.moves else 1


def default_chunks(collective: str, size: int) -> int:
    """Return the default number of chunks for a collective.

    A chunk is one rank's contribution or result, except in the collectives in `FREE_CHUNKS`.

    Example:
        >>> default_chunks("all_reduce", 5), default_chunks("all_to_all", 5), default_chunks("barrier", 5)
        (5, 10, 1)
    """
    family = family_of(collective)
    return 2 * size if family.pairwise else size if family.moves else 1


def balanced(parts: Sequence[T], plus: Callable[[T, T], T]) -> T:
    """Reduce parts in a balanced binary tree. If the number of parts is odd, the first half is longer.

    Args:
        parts: Parts to reduce; at least one.
        plus: Function that reduces two parts; its first argument is the earlier one.

    Example:
        >>> balanced("abcde", lambda low, high: f"({low}+{high})")
        '(((a+b)+c)+(d+e))'
    """
    if len(parts) < 3:
        return parts[0] if len(parts) == 1 else plus(*parts)
    half = (len(parts) + 1) // 2
    return plus(balanced(parts[:half], plus), balanced(parts[half:], plus))
