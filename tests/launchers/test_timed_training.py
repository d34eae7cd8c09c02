"""Ranks of different speed that die and are replaced: the training ends as an undisturbed one."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest
from timed_ranks import train

import unisono as un

RANKS = 3
TIMEOUT_S = 100.0


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes that are started import what these tests do."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))


def losses(rounds: int, deaths: dict[int, int], folder: Path) -> list[float]:
    """Train, and return the loss of each rank; all that were to die have died."""
    folder.mkdir()
    args = (RANKS, rounds, deaths, str(folder))
    ends = un.launch(train, RANKS, args=args, on_failure="replace", threads=1, timeout=TIMEOUT_S)
    assert {file.name for file in folder.iterdir()} == {str(number) for number in deaths}
    return [loss for loss, _ in ends]


def test_a_death_and_a_join(tmp_path: Path) -> None:
    found = losses(4, {1: 0}, tmp_path / "deaths")
    assert len(set(found)) == 1


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_twenty_random_deaths_and_joins(tmp_path: Path) -> None:
    draw = random.Random(3)
    rounds = 60
    deaths = {number: draw.randrange(RANKS) for number in draw.sample(range(1, rounds - 1), 20)}
    calm = losses(rounds, {}, tmp_path / "calm")
    found = losses(rounds, deaths, tmp_path / "deaths")
    assert len(set(found)) == 1
    assert found[0] == pytest.approx(calm[0], rel=0.03)
