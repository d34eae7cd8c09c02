"""The tutorial's programs, ported, give what the tutorial promises."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections import Counter
from itertools import product
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from pairwise import short

import unisono as un

FOLDER = Path(__file__).parents[2] / "docs" / "examples" / "tutorial"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))

everywhere = short("backend, ranks", product(["thread", "gloo"], [2, 4]), [("thread", 4), ("gloo", 2)])


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def launch(name: str, backend: str, ranks: int, **kwargs: Any) -> list[Any]:
    return un.launch(load(name).run, ranks, backend, kwargs=kwargs, timeout=60)


def test_every_program_is_tested_here() -> None:
    tested = {"blocking", "collectives", "immediate", "init_methods", "partition", "ring", "ring_in_chunks", "sgd"}
    assert set(NAMES) == tested | {"subgroup"}


@everywhere
@pytest.mark.parametrize("name", ["blocking", "immediate"])
def test_point_to_point(name: str, backend: str, ranks: int) -> None:
    assert launch(name, backend, ranks) == [1.0, 1.0, 0.0, 0.0][:ranks]


@everywhere
def test_all_reduce_in_a_subgroup(backend: str, ranks: int) -> None:
    assert launch("subgroup", backend, ranks) == [2.0, 2.0, 1.0, 1.0][:ranks]


@everywhere
def test_six_collectives(backend: str, ranks: int) -> None:
    given = [rank + 1.0 for rank in range(ranks)]
    for rank, held in enumerate(launch("collectives", backend, ranks)):
        assert held == {
            "broadcast": [1.0],
            "reduce": [sum(given)] if rank == 0 else [given[rank]],
            "all_reduce": [prod(given)],
            "scatter": [10.0 * rank],
            "gather": given if rank == 0 else [],
            "all_gather": given,
        }


@everywhere
@pytest.mark.parametrize("count", [100, 101])
def test_partitions(count: int, backend: str, ranks: int) -> None:
    ranks_seen = launch("partition", backend, ranks, count=count)
    assert Counter(sample for seen in ranks_seen for sample in seen["equal"]) == Counter(range(count))
    for name, sizes in (("uneven", [0.7, 0.2, 0.1]), ("thirds", [1 / 3, 1 / 3, 1 / 3])):
        parts = [seen[name] for seen in ranks_seen[:3]]
        samples = [sample for part in parts for sample in part]
        assert len(samples) == len(set(samples))
        assert all(abs(len(part) - size * count) < 1 for part, size in zip(parts, sizes, strict=False))
        assert samples != sorted(samples)
        if ranks > 2:
            assert set(samples) == set(range(count))


@pytest.mark.parametrize(
    ("backend", "ranks", "epochs", "reached"),
    [
        ("thread", 2, 20, 0.2),
        pytest.param("thread", 4, 20, 0.2, marks=pytest.mark.soak),
        ("gloo", 2, 4, 0.65),
        pytest.param("gloo", 4, 4, 0.65, marks=pytest.mark.soak),
    ],
)
def test_distributed_sgd(backend: str, ranks: int, epochs: int, reached: float) -> None:
    results = launch("sgd", backend, ranks, epochs=epochs)
    for loss, weights in results:
        assert loss < reached
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights, results[0][1], strict=True))


@everywhere
@pytest.mark.parametrize("name", ["ring", "ring_in_chunks"])
def test_custom_ring(name: str, backend: str, ranks: int) -> None:
    for mine, expected in launch(name, backend, ranks):
        total = sum(rank + 1.0 for rank in range(ranks))
        assert torch.equal(mine, torch.arange(float(len(mine))) * total)
        assert torch.equal(expected, mine)


@pytest.mark.parametrize("length", [1, 3, 5])
def test_ring_in_chunks_of_few_elements(length: int) -> None:
    for mine, expected in launch("ring_in_chunks", "thread", 4, length=length):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("method", ["env", "file", "tcp"])
def test_init_methods(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    assert importlib.import_module("init_methods").main(2, method) == 0


@pytest.mark.soak
def test_as_scripts() -> None:
    # At the same time, for most of it is the import of torch.
    commands = [["init_methods.py", "--ranks", "2", "--method", "tcp"], ["blocking.py", "--ranks", "2"]]
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(FOLDER / name), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, *options in commands
    ]
    said = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    # Ranks write to one pipe, so that their lines may run together.
    assert all(f"rank {rank} of 2 met the others by tcp" in said[0] for rank in (0, 1))
    assert all(f"rank {rank} has 1.0" in said[1] for rank in (0, 1))
