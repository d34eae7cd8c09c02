"""The programs in docs/examples/rpc do what they say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import unisono as un

FOLDER = Path(__file__).parents[2] / "docs" / "examples" / "rpc"
SEEDS = [0, pytest.param(1, marks=pytest.mark.soak), pytest.param(2, marks=pytest.mark.soak)]
BACKENDS = ["thread", "shm", pytest.param("gloo", marks=pytest.mark.soak)]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def launch(name: str, ranks: int, backend: str, **settings: Any) -> Any:
    return un.launch(load(name).run, ranks, backend, kwargs=settings, timeout=60)[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_tensors_are_stepped_on_their_owner(backend: str) -> None:
    before, after = launch("random_tensor", 2, backend)
    # The gradient of a sum is one, everywhere.
    assert torch.allclose(after, before - 0.05)


@pytest.mark.parametrize("seed", SEEDS)
def test_asynchronous_parameter_server_trains(seed: int) -> None:
    found = launch("parameter_server", 3, "shm", seed=seed, bound=4)
    assert found["accuracy"] > 0.93
    assert found["steps"] + found["refused"] == 2 * 400
    assert found["oldest"] <= 4


def test_staleness_bound_of_zero_is_synchronous() -> None:
    found = launch("parameter_server", 3, "thread", steps=20, batch=2, bound=0)
    assert found["steps"] == 20
    assert found["refused"] == found["oldest"] == 0


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_agent_learns_to_catch(seed: int) -> None:
    curve = launch("reinforce", 3, "shm", seed=seed)
    assert sum(curve[:3]) / 3 < 0.5
    assert sum(curve[-10:]) / 10 > 0.9


def test_agent_plays_in_gymnasium() -> None:
    curve = launch("reinforce", 2, "thread", env="CartPole-v1", rounds=2, episodes=1)
    assert all(reward >= 1 for reward in curve)


@pytest.mark.soak
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.soak
def test_pipeline_training_is_independent_of_micro_batches(parts: int) -> None:
    losses, _ = launch("pipeline", 3, "shm", steps=8, parts=parts)
    whole, _ = launch("pipeline", 1, "thread", steps=8, parts=1)
    assert losses == pytest.approx(whole, rel=1e-9)


def test_pipeline_trains() -> None:
    _, accuracy = launch("pipeline", 3, "thread", steps=60)
    assert accuracy > 0.85
