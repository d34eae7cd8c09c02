"""Every partitioner and sampler in `mutants/partitioners/` is wrong in one way, and a check says in which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from assertions import assertion_of
from loading import load, mutants

from unisono.data import PARTITIONERS, PartitionSampler
from unisono.testing import partitioners, samplers
from unisono.testing.partitioners import Samples

MUTANTS = mutants("partitioners")
DATA = Samples(100)
RIGHT = {
    "check_lossless": PARTITIONERS["strided"],
    "check_same_everywhere": PARTITIONERS["shuffled"],
    "check_balance": PARTITIONERS["balanced"],
    "check_resume": PARTITIONERS["stratified"],
}


def run_check(name: str, mutant: Any) -> None:
    """One check, as the tests of the registry apply it."""
    check = getattr(partitioners if hasattr(partitioners, name) else samplers, name)
    if name == "check_resume":
        check(mutant.of, DATA, [3, 2], [[1.0, 0.5, 0.0]], seed=1)
    elif name in RIGHT:
        check(mutant.of, DATA, [1 / 3] * 3, seed=1)
    elif name == "check_global_order":
        check(mutant, DATA, [3, 2, 2], [20, 31])
    elif name == "check_states":
        check(mutant, DATA, [3, 2, 4], [[0.5, 0.2, 0.9], [0.3, 0.6]])
    elif name == "check_ranks":
        check(mutant, DATA, 3)
    else:
        check(mutant, DATA)


@pytest.mark.parametrize("path", MUTANTS, ids=lambda path: path.stem)
def test_conformance_kills_mutant(path: Path) -> None:
    mutant = load(path)
    with pytest.raises(AssertionError, match=mutant.ERROR):
        run_check(mutant.CHECK, mutant.MUTANT)


@pytest.mark.parametrize("check", sorted({load(path).CHECK for path in MUTANTS}))
def test_correct_implementations_survive(check: str) -> None:
    assert assertion_of(run_check, check, RIGHT.get(check, PartitionSampler)) == ""


def test_every_conformance_test_kills_a_mutant() -> None:
    # Those of divisions kill in test_partition_mutants.py; check_cover is a part of the others.
    others = {"check_partitioner", "check_division", "check_seed", "check_cover"}
    checks = {name for name in [*partitioners.__all__, *samplers.__all__] if name.startswith("check_")} - others
    assert {load(path).CHECK for path in MUTANTS} == checks
