"""Every change in `mutants/helpers/` makes a part of the package wrong, and a check says in which way."""

from __future__ import annotations

from pathlib import Path

import pytest
from loading import load, mutants

from unisono.testing.conformance import CHECKS, World

MUTANTS = mutants("helpers")
BY_NAME = {check.__name__: check for check in CHECKS}


@pytest.mark.parametrize("path", MUTANTS, ids=lambda path: path.stem)
def test_conformance_kills_mutant(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = load(path)
    mutant.put_in(monkeypatch)
    with pytest.raises(Exception, match=mutant.ERROR):
        BY_NAME[mutant.CHECK](World("thread", timeout=10.0))


def test_mutants_exist() -> None:
    assert len(MUTANTS) >= 8
