"""Every transport in `mutants/transports/` is wrong, and a law says in which way."""

from __future__ import annotations

from pathlib import Path

import pytest
from loading import load, mutants

from unisono.testing.conformance import LAWS, World
from unisono.transports import TRANSPORTS
from unisono.transports.thread import ThreadTransport

MUTANTS = mutants("transports")
BY_NAME = {law.__name__: law for law in LAWS}


@pytest.mark.parametrize("path", MUTANTS, ids=lambda path: path.stem)
def test_conformance_kills_mutant(path: Path) -> None:
    mutant = load(path)
    law = BY_NAME[mutant.LAW]
    if not issubclass(mutant.Mutant, ThreadTransport):
        world = World("thread", mutant.Mutant, timeout=1.0)
        with pytest.raises(Exception, match=mutant.COMPLAINT):
            law(world)
        return
    TRANSPORTS.register(path.stem, mutant.Mutant)
    try:
        with pytest.raises(Exception, match=mutant.COMPLAINT):
            law(World(path.stem, timeout=1.0))
    finally:
        TRANSPORTS.unregister(path.stem)


def test_mutants_exist() -> None:
    assert len(MUTANTS) >= 15
