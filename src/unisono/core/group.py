"""Process group: a named, ordered set of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Group"]


@dataclass(frozen=True, slots=True)
class Group:
    """One rank's view of a group.

    Attributes:
        name: Unique among all groups of a job, the same on every member.
        rank: This process's (or thread's) place in it.
        members: For each rank here, its rank in the first group of the job.
        size: Number of ranks.

    Example:
        >>> world = Group("world", rank=2, members=(0, 1, 2, 3))
        >>> world.child("evens", (0, 2))
        Group(name='world/evens', rank=1, members=(0, 2))
    """

    name: str
    rank: int
    members: tuple[int, ...]
    size: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.members))

    @classmethod
    def world(cls, rank: int, size: int, name: str = "world") -> Group:
        return cls(name, rank, tuple(range(size)))

    def child(self, name: str, ranks: Sequence[int]) -> Group:
        """Return the subgroup of these ranks, in the order of the list; it must contain this rank."""
        return Group(f"{self.name}/{name}", list(ranks).index(self.rank), tuple(self.members[r] for r in ranks))
