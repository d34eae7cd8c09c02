"""The floors hold, and the contracts that say so would notice if they did not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The tree's own `src` comes first, so that an installed package is not looked at instead.
LINT = """
import sys
sys.path.insert(0, "src")
from importlinter.cli import lint_imports
sys.exit(lint_imports(cache_dir=None, no_logo=True))
"""


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LINT]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=False)


def test_floors_hold() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "line", "broken"),
    [
        ("group.py", "import unisono.transport", "unisono.group is not allowed to import unisono.transport"),
        ("transports/bad.py", "import unisono.schedules", "unisono.transports is not allowed to import"),
        ("wrappers/bad.py", "import unisono.transports", "unisono.wrappers is not allowed to import"),
        ("execute.py", "import unisono.communicator", "unisono.execute is not allowed to import"),
        ("schedules/all_reduce/bad.py", "import torch", "unisono.schedules is not allowed to import torch"),
        ("data/bad.py", "import unisono.group, unisono.transport", "unisono.data is not allowed to import"),
        ("newcomer.py", "", "unisono.newcomer"),
    ],
)
def test_a_wrong_import_is_noticed(tmp_path: Path, module: str, line: str, broken: str) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "src" / "unisono" / module).open("a") as file:
        file.write(f"\n{line}\n")
    done = lint(tmp_path)
    assert done.returncode != 0
    assert broken in " ".join(done.stdout.split()), done.stdout
