"""Random states, writers and deaths: what loads is what one writer has saved, or nothing was changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_fuzzing import rounds

import unisono as un


def play(folder: Path, first: int, count: int) -> dict[str, int]:
    """Play rounds in a process that may fork writers: this one has threads."""
    [found] = un.launch(lambda comm: rounds(folder, first, count), 1, "shm", threads=1)
    return found


def test_some_rounds(tmp_path: Path) -> None:
    found = play(tmp_path, 0, 8)
    assert sum(found.values()) == 8
    assert found["loaded"] >= 4
    assert found["refused"] >= 1


@pytest.mark.soak
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("part", range(4))
def test_two_thousand_rounds(tmp_path: Path, part: int) -> None:
    found = play(tmp_path, 1000 + 500 * part, 500)
    assert sum(found.values()) == 500
    assert min(found[ending] for ending in ("loaded", "refused", "nothing")) >= 5, found
