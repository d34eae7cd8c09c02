"""The question and the answer of start-up, and what all ways check of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from unisono.control.server import ControlServer
from unisono.core.control import ControlPlane

__all__ = ["InitRequest", "Rendezvous", "checked", "env_number", "nothing"]


@dataclass(slots=True)
class InitRequest:
    """Arguments of the caller of `init`.

    Attributes:
        init_method: As passed.
        rank, size: As passed; or as found, so that errors name the rank.
        deadline: Time by which all ranks must have joined, on the monotonic clock.
        secret: As passed.
    """

    init_method: str | None
    rank: int | None
    size: int | None
    deadline: float
    secret: str | bytes | None

    def numbers(self) -> tuple[int, int]:
        """Rank and size, if they were given and make sense."""
        if self.rank is None or self.size is None:
            raise ValueError(
                f"{self.init_method} gives an address, but not the rank of this process: pass rank and world_size too"
            )
        return checked(self.rank, self.size)


def checked(rank: int, size: int) -> tuple[int, int]:
    """Rank and size, if they make sense together."""
    for name, number in (("rank", rank), ("world_size", size)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise ValueError(f"{name} must be a whole number, not {number!r}")
    if size < 1:
        raise ValueError(f"world_size must be at least 1, not {size}")
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not among 0 to {size - 1}, the ranks of a world of {size}")
    return rank, size


def env_number(name: str) -> int | None:
    """Return the number in a variable of the environment; None if it is not set, or empty."""
    text = os.environ.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}, which is not a number") from None


def nothing() -> None:
    """Do nothing: there is nothing to release."""


@dataclass(slots=True)
class Rendezvous:
    """Place of this process in the world. Its group is joined already; join again to be notified of failures.

    Attributes:
        rank, size: This process's rank, and the number of ranks.
        local_rank: Its number on its host, if known.
        control: Its own handle to the control plane.
        server: The control plane itself, if this process hosts it.
        address: The address of this host that the other ranks can reach.
        name: The name of the world's group, different for each `init` of a job.
        source: The decision and its reason, in one line for the log.
        network: The backend that "auto" uses between hosts; "" if it depends on them.
    """

    rank: int
    size: int
    local_rank: int | None
    control: ControlPlane
    server: ControlServer | None
    address: str
    name: str
    source: str
    release: Callable[[], None] = field(default=nothing, repr=False)
    network: str = ""

    def close(self) -> None:
        """Leave without an error. Idempotent. A server of this process serves the others until they have left."""
        release = self.release
        self.release = nothing
        self.control.close()
        release()
