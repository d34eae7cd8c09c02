"""The programs of mpi4py's tutorial: the counterparts in docs/examples/mpi4py print what mpi4py's own print."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from mpi_jobs import run

import unisono as un
from unisono.host.mpi_library import find_mpirun

HERE = Path(__file__).parent / "tutorial"
THERE = Path(__file__).parents[2] / "docs" / "examples" / "mpi4py"
NAMES = sorted(path.stem for path in THERE.glob("*.py"))
RANKS = 4


@cache
def load(name: str) -> ModuleType:
    """Return a program as a module that ranks find by its name, as exposed functions must be found."""
    spec = importlib.util.spec_from_file_location(f"mpi4py_{name}", THERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


def on_threads(name: str) -> list[str]:
    """Return what a counterpart prints on ranks that are threads."""
    module = load(name)
    if hasattr(module, "main"):
        return [module.main("thread")]
    return sorted(un.launch(module.run, nprocs=RANKS, backend="thread"))


def under_mpirun(program: Path) -> list[str]:
    """Return what a program's ranks print."""
    launcher = find_mpirun()
    assert launcher is not None
    runner = [sys.executable, "-m", "mpi4py.futures"] if program.stem == "pool" else [sys.executable]
    ended = run([launcher, "-n", "1" if program.stem == "pi" else str(RANKS), *runner, str(program)])
    assert ended.status == 0, ended.err
    return sorted(ended.out.splitlines())


def test_every_program_has_its_counterpart() -> None:
    assert sorted(path.stem for path in HERE.glob("*.py") if path.stem != "pi_worker") == NAMES


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("objects", ["rank 0: None", "rank 1: {'a': 7, 'b': 3.14}", "rank 2: None", "rank 3: None"]),
        ("matrix_vector", [f"rank {r}: {[506.0 + 2376 * r + 792 * i for i in range(3)]}" for r in range(4)]),
        ("persistent", [f"rank {r}: [{8.0 * r}]" for r in range(4)]),
        ("pi", ["pi is about 3.1416009869"]),
    ],
)
def test_counterparts_on_threads(name: str, printed: list[str]) -> None:
    assert on_threads(name) == printed


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_the_counterpart_prints_what_the_program_prints(name: str) -> None:
    assert on_threads(name) == under_mpirun(HERE / f"{name}.py")


@pytest.mark.soak
@pytest.mark.parametrize("name", ["arrays", "gather_array", "objects", "persistent", "window"])
def test_the_counterpart_prints_the_same_under_mpirun(name: str) -> None:
    assert under_mpirun(THERE / f"{name}.py") == on_threads(name)
