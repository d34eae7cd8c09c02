"""This process's rank in its job, according to the launcher's environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Launched", "number"]


@dataclass(frozen=True, slots=True)
class Launched:
    """Rank of this process in its job, globally and on this host.

    Attributes:
        by: Name of the launcher, for error messages.
        rank, size: This process's rank and the number of ranks; None if unset or invalid.
        local_rank, local_size: Rank and number of ranks within this host; None if unset or invalid.
    """

    by: str
    rank: int | None
    size: int | None
    local_rank: int | None = field(default=None, repr=False)
    local_size: int | None = field(default=None, repr=False)

    @property
    def on_several_hosts(self) -> bool:
        """Return whether some of the job's processes are known to be on other hosts."""
        return self.size is not None and self.local_size is not None and self.local_size < self.size


def number(name: str, environment: Mapping[str, str] = os.environ) -> int | None:
    """Return an environment variable's value if it is an integer, else None."""
    text = environment.get(name, "").strip()
    return int(text) if text.isdecimal() else None
