"""Every transport in `mutants/transports/` is wrong, and a check says in which way."""

from __future__ import annotations

from pathlib import Path

import pytest
from loading import load, mutants

from unisono.testing.conformance import CHECKS, World
from unisono.transports import TRANSPORTS
from unisono.transports.thread import ThreadTransport

MUTANTS = mutants("transports")
BY_NAME = {check.__name__: check for check in CHECKS}


@pytest.mark.parametrize("path", MUTANTS, ids=lambda path: path.stem)
def test_conformance_kills_mutant(path: Path) -> None:
    mutant = load(path)
    check = BY_NAME[mutant.CHECK]
    if not issubclass(mutant.Mutant, ThreadTransport):
        # Simulated ranks find at once that none of them can continue.
        world = World(getattr(mutant, "BACKEND", "thread"), mutant.Mutant, timeout=1.0)
        with pytest.raises(Exception, match=mutant.ERROR):
            check(world)
        return
    TRANSPORTS.register(path.stem, mutant.Mutant)
    try:
        with pytest.raises(Exception, match=mutant.ERROR):
            check(World(path.stem, timeout=1.0))
    finally:
        TRANSPORTS.unregister(path.stem)


def test_mutants_exist() -> None:
    assert len(MUTANTS) >= 15
