"""Mistakes that real threads hardly ever show, which some seed shows and shows again; and schedulers that are wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from random import SystemRandom
from typing import Any

import pytest
import torch
from loading import load, mutants

import unisono as un
from unisono.simulation import TaskScheduler
from unisono.testing import chaos

MUTANTS = mutants("simulated")
SEEDS = range(60)


def program(comm: un.Communicator) -> float:
    t = torch.ones(100)
    for algorithm in ("ring", "one_shot", "binomial"):
        comm.all_reduce(t, algorithm=algorithm)
    return t.sum().item()


def complaints(seed: int, wrap: Any = None) -> list[str]:
    # Wrong or narrower on purpose.
    run = un.simulate(program, 3, seed=seed, preempt=0.2, wrap=wrap, timeout=10.0, on_failure="continue")
    return [str(end) for end in run.results if isinstance(end, BaseException)]


@pytest.mark.parametrize("path", MUTANTS, ids=lambda path: path.stem)
def test_seed_kills_mutant(path: Path) -> None:
    mutant = load(path)
    killed = next((seed for seed in SEEDS if complaints(seed, mutant.Mutant)), None)
    assert killed is not None, f"none of {len(SEEDS)} seeds shows the mistake"
    for _ in range(2):
        assert any(re.search(mutant.ERROR, said) for said in complaints(killed, mutant.Mutant))


def test_unmodified_program_passes_every_seed() -> None:
    assert [seed for seed in SEEDS[:8] if complaints(seed)] == []


def test_mutants_exist() -> None:
    assert len(MUTANTS) >= 3


# -- schedulers ------------------------------------------------------------------------------------
def picks_by_itself(scheduler: TaskScheduler, among: int) -> int:
    return SystemRandom().randrange(among)


@pytest.mark.parametrize(
    ("method", "wrong"), [("choose", picks_by_itself), ("chance", lambda scheduler: SystemRandom().random())]
)
def test_nondeterministic_scheduler_is_detected(
    monkeypatch: pytest.MonkeyPatch, method: str, wrong: Callable[..., object]
) -> None:
    monkeypatch.setattr(TaskScheduler, method, wrong)
    with pytest.raises(chaos.ChaosError, match="does not run the same way twice"):
        chaos.check(program, 3, seeds=range(10))
