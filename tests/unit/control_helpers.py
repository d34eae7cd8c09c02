"""Ranks of a control plane: handles of all of them, and the failures reported to each."""

from __future__ import annotations

import queue
from collections.abc import Callable
from functools import partial
from typing import Any

from waiting import run_concurrently

from unisono.control.client_base import ControlClient
from unisono.core.failure import Cause
from unisono.core.group import Group

__all__ = ["SECRET", "SOON", "Make", "Told", "everywhere", "world"]


SECRET = b"of the tests"
SOON = 10.0

Make = Callable[[], ControlClient]


class Told:
    """A callback that keeps the reported causes."""

    def __init__(self) -> None:
        self._causes: queue.SimpleQueue[Cause] = queue.SimpleQueue()

    def __call__(self, cause: Cause) -> None:
        self._causes.put(cause)

    def only(self) -> Cause:
        """The one cause that comes."""
        cause = self._causes.get(timeout=SOON)
        assert self._causes.empty()
        return cause

    def nothing(self) -> bool:
        return self._causes.empty()


def world(make: Make, size: int) -> tuple[list[ControlClient], list[Group], list[Told]]:
    """Return joined handles of all ranks, and the failures reported to each."""
    controls, groups = [make() for _ in range(size)], [Group.world(rank, size) for rank in range(size)]
    told = [Told() for _ in range(size)]
    for control, group, heard in zip(controls, groups, told, strict=True):
        control.join(group, heard)
    return controls, groups, told


def everywhere(
    controls: list[ControlClient], groups: list[Group], act: Callable[[ControlClient, Group], Any]
) -> list[Any]:
    """Return the result or the exception of each rank."""
    return run_concurrently(*[partial(act, control, group) for control, group in zip(controls, groups, strict=True)])
