"""Hooks of parameters that ask nothing while nothing can have changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from unisono.compiled import part
from unisono.gradients.bucket import Bucket

__all__ = ["Hooks", "is_averagers"]

_Hook, _Running = part("Hook"), part("Running")


class _Arrived(partial[None]):
    """The hook of an averager, where nothing is compiled."""


def is_averagers(hook: object) -> bool:
    """Whether it was made here."""
    return isinstance(hook, _Arrived if _Hook is None else (_Arrived, _Hook))


class Hooks:
    """Makes the hooks of one averager. Where they are compiled, only the first of a step's many runs in Python.

    Args:
        arrived: What a hook does: called with a parameter's number, and the parameter.
        full: Called when one that did not call `arrived` has filled a bucket.
    """

    def __init__(self, arrived: Callable[[int, torch.Tensor], None], full: Callable[[], None]) -> None:
        self._arrived = arrived
        self._running = _Running(full) if _Running is not None else None
        self._made: dict[int, Any] = {}

    def make(self, index: int) -> Callable[[torch.Tensor], None]:
        """A hook of the parameter with this number."""
        arrived = _Arrived(self._arrived, index)
        if self._running is None:
            return arrived
        hook: Callable[[torch.Tensor], None] = _Hook(arrived, self._running)
        self._made[index] = hook
        return hook

    def place(self, where: Mapping[int, tuple[Bucket, int]]) -> None:
        """Gradients belong there from now on."""
        for index, hook in self._made.items():
            hook.place(*where.get(index, (None, 0)))

    def note(self, number: int) -> None:
        """Gradients of the pass of this number, and no others, may be noted in their buckets without a word."""
        if self._running is not None:
            self._running.number = number

    def forget(self) -> None:
        """Nothing is to be noted any more."""
        self.note(-1)
        self.place({})
