"""The floors hold, and the contracts that say so would notice if they did not."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/unisono"
MOST_ROOMS, MOST_LAYERS, MOST_ROOT_MODULES = 30, 12, 5
# The tree's own `src` comes first, so that an installed package is not looked at instead.
LINT = """
import sys
sys.path.insert(0, "src")
from importlinter.cli import lint_imports
sys.exit(lint_imports(cache_dir=None, no_logo=True))
"""


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LINT]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)


def test_layers_hold() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def spoil(root: Path, module: str, line: str) -> str:
    """Return the output of the linter for a copy of the tree with one more line in one module."""
    shutil.copytree(ROOT / "src", root / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    with (root / "src" / "unisono" / module).open("a") as file:
        file.write(f"\n{line}\n")
    done = lint(root)
    assert done.returncode != 0
    return " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("module", "importer", "imported"),
    [
        ("core/group.py", "unisono.core", "unisono.control"),
        ("transports/bad.py", "unisono.transports", "unisono.communicator"),
        ("wrappers/bad.py", "unisono.wrappers", "unisono.transports"),
        ("collectives/executor.py", "unisono.collectives", "unisono.communicator"),
        ("collectives/algorithms/all_reduce/bad.py", "unisono.collectives.algorithms", "torch"),
        ("data/bad.py", "unisono.data", "unisono.core.transport"),
        ("comm/bad.py", "unisono.comm", "unisono.simulation"),
        ("pool/bad.py", "unisono.pool", "unisono.lab"),
    ],
)
def test_forbidden_import_is_detected(tmp_path: Path, module: str, importer: str, imported: str) -> None:
    assert f"{importer} is not allowed to import {imported}" in spoil(tmp_path, module, f"import {imported}")


def test_module_without_a_layer_is_detected(tmp_path: Path) -> None:
    assert "not listed as layers: - unisono.newcomer" in spoil(tmp_path, "newcomer.py", "")


def test_rooms_and_layers_are_few() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["id"] == "layers")
    # The layer in parentheses is `python -m unisono` alone.
    assert len([layer for layer in layers if not layer.startswith("(")]) <= MOST_LAYERS
    rooms = {path.parent.name for path in SOURCE.glob("*/*.py")}
    assert len(rooms) <= MOST_ROOMS
    assert len(list(SOURCE.glob("*.py"))) <= MOST_ROOT_MODULES
