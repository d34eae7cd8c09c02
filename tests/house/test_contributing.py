"""Promise of CONTRIBUTING: one new file is a new algorithm, verified, selectable by name, correct on all transports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import unisono as un
from unisono.collectives.algorithms import ALGORITHMS, all_reduce
from unisono.collectives.verify.prover import verify

ROOT = Path(__file__).parents[2]
NAME = "star"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder that counts as part of `unisono.collectives.algorithms.all_reduce`, with the file of the page in it."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    text = re.search(rf"`{NAME}\.py`.*?```python\n(.*?)```", page, re.DOTALL).group(1)
    assert len(text.splitlines()) < 40
    (tmp_path / f"{NAME}.py").write_text(text)
    monkeypatch.setattr(all_reduce, "__path__", [*all_reduce.__path__, str(tmp_path)])
    return str(tmp_path)


def program(comm: un.Communicator, folder: str) -> list[float]:
    if folder not in all_reduce.__path__:
        all_reduce.__path__.append(folder)
    t = torch.arange(11.0) + comm.rank
    comm.all_reduce(t, algorithm=NAME)
    return t.tolist()


def test_algorithm_is_one_file(folder: str) -> None:
    assert NAME in ALGORITHMS["all_reduce"].names()
    for size in (1, 2, 3, 8, 13):
        verify("all_reduce", ALGORITHMS["all_reduce"][NAME], size)


@pytest.mark.parametrize("backend", ["thread", "gloo", "shm"])
def test_example_algorithm_runs_on_every_transport(folder: str, backend: str) -> None:
    assert un.launch(program, 3, backend, args=(folder,), timeout=30) == [[3.0 * i + 3 for i in range(11)]] * 3
