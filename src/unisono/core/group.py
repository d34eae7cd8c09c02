"""Process groups: named, ordered sets of ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Group"]

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Group:
    """One rank's view of a group.

    Attributes:
        name: Name, unique within the job and the same on every member.
        rank: Rank of this process (or thread) in the group.
        members: For each rank of this group, its rank in the job's first group.
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

    @property
    def text(self) -> str:
        """Description of the group for error messages: its ranks in the job, and how it was created.

        Error messages don't show `name`, which would mean nothing to users: it consists of internal counters, such as
        the number of a job or of a call to `split`, `dup`, `subgroup` or `rebuild`.

        Example:
            >>> Group.world(2, 4, "world1").text, Group("world1/2.0", 1, (0, 2)).text
            ('world', 'ranks 0, 2 (split 2 of world)')
        """
        name = re.sub(r"^([^/~]*world\d*|torch/[0-9a-f]{8})", "world", self.name)
        root, *made = re.split(r"(?=/\d+\.|~\d)", name)
        if not made:
            return root
        how = f"{'rebuild' if made[-1][0] == '~' else 'split'} {made[-1][1:].partition('.')[0]}"
        more = f" and {self.size - _SHOWN} more" if self.size > _SHOWN else ""
        ranks = f"rank{'s'[: self.size > 1]} {', '.join(map(str, self.members[:_SHOWN]))}{more}"
        return f"{ranks} ({how} of {'a part of ' if made[1:] else ''}{root})"

    def child(self, name: str, ranks: Sequence[int]) -> Group:
        """Return the subgroup of these ranks, in list order; `ranks` must contain this rank."""
        return Group(f"{self.name}/{name}", list(ranks).index(self.rank), tuple(self.members[r] for r in ranks))
