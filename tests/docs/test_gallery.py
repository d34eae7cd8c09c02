"""The programs in docs/examples/gallery learn what the page docs/gallery/index.md says."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import unisono as un

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "examples" / "gallery"
PAGE = ROOT / "docs" / "gallery" / "index.md"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Ranks that are threads share the cores without further threads of torch's."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SCRIPTS = {
    "language_model": (2, r"step 200: ([\d.]+) bits", 0.0, 3.3),
    "digits_cnn": (2, r"epoch 5: ([\d.]+)%", 95.0, 100.0),
    "uneven_inputs": (3, r"([\d.]+)% of all samples", 98.0, 100.0),
    "federated_averaging": (2, r"round 15: ([\d.]+)% same mix", 90.0, 100.0),
    "parameter_server": (None, r": ([\d.]+)% of the test images", 90.0, 100.0),
    "reinforcement_learning": (None, r"round 50: (\d+)%", 85.0, 100.0),
    "resume_on_other_ranks": (None, r"never stopped: (\S+)", 0.0, 1e-12),
}
"""Ranks of `unisono run`, or None for a program that starts its ranks; the result it prints, and its bounds."""


def load(name: str, folder: Path = FOLDER) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def launch(name: str, function: str, ranks: int, *args: Any, backend: str = "thread") -> list[Any]:
    return un.launch(getattr(load(name), function), ranks, backend, args, timeout=60)


def test_page_links_every_program_and_each_is_short() -> None:
    linked = re.findall(r"\(\.\./examples/gallery/(\w+)\.py\)", PAGE.read_text())
    assert sorted(linked) == NAMES
    assert all(len((FOLDER / f"{name}.py").read_text().splitlines()) <= 85 for name in NAMES)


def test_language_model_learns() -> None:
    first, second = launch("language_model", "train", 2, 20)
    losses, text = first
    assert second == first
    assert losses[0] > 6
    assert losses[-1] < 4.8
    assert text.startswith("The ")


def test_digits_are_read_alike_on_any_number_of_ranks() -> None:
    two = launch("digits_cnn", "train", 2, 1)
    assert two[0] == two[1]
    assert two[0][-1] > 0.8


def test_uneven_inputs_use_every_sample() -> None:
    results = launch("uneven_inputs", "train", 3, 8)
    counts, accuracy = results[0]
    assert results == [results[0]] * 3
    assert counts == [(500, 16), (250, 8), (250, 8)]
    assert accuracy > 0.75


def test_federated_averaging_suffers_from_uneven_mixes_of_labels() -> None:
    alike, uneven = launch("federated_averaging", "compare", 2, 4)[0]
    assert alike[-1] > 0.8
    assert uneven[-1] < alike[-1] - 0.2


def test_parameter_server_uses_every_gradient() -> None:
    steps, accuracy = launch("parameter_server", "run", 3, 60)[0]
    assert steps == 120
    assert accuracy > 0.7


def test_observers_play_and_the_agent_learns_from_each_game() -> None:
    curve = launch("reinforcement_learning", "run", 3, 3, 8)[0]
    assert len(curve) == 3
    assert all(0 <= share <= 1 for share in curve)


def test_training_resumed_on_other_ranks_equals_one_that_was_never_stopped() -> None:
    start, loss, difference = load("resume_on_other_ranks").compare("sim")
    assert start == 30
    assert loss < 0.2
    assert difference < 1e-12


@pytest.mark.soak
def test_wrong_results_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    # A sampler that restarts the epoch after a load trains on other batches than an uninterrupted training.
    monkeypatch.setattr(un.data.GlobalBatchSampler, "load_state_dict", lambda self, state: None)
    _, _, difference = load("resume_on_other_ranks").compare("sim")
    assert difference > 1e-6


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_as_scripts(name: str) -> None:
    ranks, pattern, least, most = SCRIPTS[name]
    commands = [[f"{FOLDER / name}.py"]]
    if ranks:
        commands.append(["-m", "unisono", "run", "-n", str(ranks), *commands[0]])
    for words in commands:
        command = [sys.executable, "-W", "error", *words]
        ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0, ended.stderr
        found = re.search(pattern, ended.stdout)
        assert found, ended.stdout
        assert least <= float(found[1]) <= most
