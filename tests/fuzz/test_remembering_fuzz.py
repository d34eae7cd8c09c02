"""Averagers, averages and guards follow a model that is loaded, thawed, assigned or added to, or refuse it.

A failure names its seed, and the command that runs it again. `make soak` runs 5,220 programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from remembering_fuzzing import OUTER, Maker, failures

from unisono.gradients import DiLoCo, LocalSGD, NanGuard
from unisono.utils import EMA

LONG = [("thread", 2, 250), ("thread", 3, 250), ("thread", 4, 250), ("shm", 2, 60), ("shm", 3, 60)]
MOST = 2


def check(found: Iterator[str]) -> None:
    texts = list(islice(found, MOST))
    assert not texts, "\n\n".join(texts)


def test_random_programs() -> None:
    check(failures(range(12), "thread", 2))


@pytest.mark.soak
@pytest.mark.parametrize("block", range(6))
@pytest.mark.parametrize(("backend", "size", "count"), LONG)
def test_many_random_programs(backend: str, size: int, count: int, block: int) -> None:
    first = 1000 * block
    check(failures(range(first, first + count), backend, size))


class _KeepsAnchor(DiLoCo):
    """The anchor stays when a model is loaded."""

    def _on_load(self, name: str, module: torch.nn.Module) -> None:
        pass


class _KeepsMomentum(DiLoCo):
    """Momentum of the weights before moves those that were loaded."""

    def _on_load(self, name: str, module: torch.nn.Module) -> None:
        assert self.outer is not None
        before = dict(self.outer.state)
        super()._on_load(name, module)
        self.outer.state.update(before)


class _AveragesFirst(LocalSGD):
    """Averages the parameters of the beginning."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.first = [tensor for _, tensor in self.named]

    def _tensors(self, fragment: Any) -> list[torch.Tensor]:
        super()._tensors(fragment)
        return [self.first[i].detach() for i in fragment.members]


class _UpdatesFirst(EMA):
    """Averages the parameters of the beginning."""

    def _follow_model(self) -> None:
        pass


class _GuardsFirst(NanGuard):
    """Looks at the parameters of the beginning."""

    def check(self) -> None:
        assert isinstance(self._model, torch.nn.Module)
        self._hooked |= {parameter._cdata for parameter in self._model.parameters()}
        super().check()


MUTANTS: dict[type, tuple[str, Maker]] = {
    _KeepsAnchor: ("DiLoCo", partial(_KeepsAnchor, **OUTER)),
    _KeepsMomentum: ("DiLoCo", partial(_KeepsMomentum, **OUTER)),
    _AveragesFirst: ("LocalSGD", _AveragesFirst),
    _UpdatesFirst: ("EMA", _UpdatesFirst),
    _GuardsFirst: ("NanGuard", _GuardsFirst),
}


@pytest.mark.soak
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_found(mutant: type) -> None:
    assert next(failures(range(1000), "thread", 2, mutant=dict([MUTANTS[mutant]])), None) is not None
