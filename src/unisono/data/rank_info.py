"""Rank and world size, from any object that knows them."""

from __future__ import annotations

import operator
from typing import Any

import torch.distributed as dist

__all__ = ["ranks_of"]


def ranks_of(comm: Any = None, num_replicas: int | None = None, rank: int | None = None) -> tuple[int, int]:
    """This rank, and how many there are.

    Args:
        comm: Whatever has a `rank` and a `size`, as values or methods: a `Communicator`, an mpi4py communicator,
            a torch process group.
        num_replicas, rank: Both instead of `comm`. With none of the three: torch's default group, if there
            is one, else a world of one.

    Raises:
        TypeError: `comm` has no rank and size, or a number is no whole number.
        ValueError: Both ways were given, or half of one, or the rank is not below the number of ranks.

    Example:
        >>> ranks_of(num_replicas=4, rank=3)
        (3, 4)
    """
    if comm is not None:
        if num_replicas is not None or rank is not None:
            raise ValueError("pass comm, or num_replicas and rank, but not both")
        try:
            known = [getattr(comm, name) for name in ("rank", "size")]
        except AttributeError as error:
            raise TypeError(
                f"comm must have a rank and a size, which a {type(comm).__name__} has not; without a communicator "
                "pass num_replicas=... and rank=..."
            ) from error
        rank, num_replicas = (value() if callable(value) else value for value in known)
    elif num_replicas is None and rank is None:
        grouped = dist.is_available() and dist.is_initialized()
        rank, num_replicas = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
    elif num_replicas is None or rank is None:
        raise ValueError("num_replicas and rank belong together; pass both, or a communicator")
    number, size = operator.index(rank), operator.index(num_replicas)
    if not 0 <= number < size:
        raise ValueError(f"rank {number} is out of range: {size} ranks are numbered from 0 to {size - 1}")
    return number, size
