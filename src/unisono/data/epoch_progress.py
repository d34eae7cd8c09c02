"""Progress of a rank through its samples of an epoch, and what it implies about other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from unisono.data.indices import Indices

__all__ = ["EpochProgress", "EpochWarning", "unchanged_on_error"]


class EpochWarning(UserWarning):
    """Warning that an epoch was restarted without `set_epoch`: its samples have the same order as before.

    Example:
        >>> import warnings
        >>> sampler = un.data.PartitionSampler(range(2))
        >>> for _ in sampler:
        ...     sampler.advance(1)
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     first = next(iter(sampler))
        >>> caught[0].category is un.data.EpochWarning
        True
    """


@dataclass(eq=False)
class EpochProgress:
    """One pass of this rank through its samples.

    Attributes:
        state: The constant part of the state.
        indices: The samples of the pass.
        start, taken: Number of committed samples at the start of the pass, and now.
        batch: Largest number committed in one call.
        begun: Whether an iteration has started.
        ended: Whether an iteration has reached the end.
        through: Whether the ranks that have one more sample have used it too; None if unknown. Needed only when
            this rank has used all of its own.
        over: Whether it was loaded complete, in the epoch that is requested: it is not begun again.
    """

    state: dict[str, Any]
    indices: Indices
    start: int = 0
    taken: int = 0
    batch: int = 0
    begun: bool = False
    ended: bool = False
    through: bool | None = False
    over: bool = False

    @property
    def complete(self) -> bool:
        return self.taken == len(self.indices)

    def advance(self, count: int) -> None:
        self.taken += count
        if count and self.complete:
            # A batch that was cut short is the last one of all ranks. If a loader has fetched ahead, the end of
            # its walk will tell nothing.
            self.through = True if count < self.batch else None if self.ended else False
        self.batch = max(self.batch, count)

    def end(self) -> None:
        self.ended = True
        # The loop is over, and so are those of all ranks before any rank saves a state.
        self.through = True if self.complete and self.through is False else self.through


@contextmanager
def unchanged_on_error(instance: Any) -> Iterator[None]:
    """Restore the object's attributes if the block raises."""
    before = dict(vars(instance))
    try:
        yield
    except BaseException:
        vars(instance).update(before)
        raise
