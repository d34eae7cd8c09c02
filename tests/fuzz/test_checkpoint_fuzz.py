"""Random states, writers and deaths: what loads is what one writer has saved, or nothing was changed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("checkpoint_fuzzing.py")


def play(folder: Path, first: int, count: int, limit_s: float) -> dict[str, int]:
    command = [sys.executable, "-W", "ignore", str(PROGRAM), str(folder), str(first), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = ast.literal_eval(done.stdout.splitlines()[-1])
    return found


def test_some_rounds(tmp_path: Path) -> None:
    found = play(tmp_path, 0, 8, 120)
    assert sum(found.values()) == 8
    assert found["loaded"] >= 4
    assert found["refused"] >= 1


@pytest.mark.soak
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("part", range(4))
def test_two_thousand_rounds(tmp_path: Path, part: int) -> None:
    found = play(tmp_path, 1000 + 500 * part, 500, 1900)
    assert sum(found.values()) == 500
    assert min(found[ending] for ending in ("loaded", "refused", "nothing")) >= 5, found
