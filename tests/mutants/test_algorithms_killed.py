"""Every algorithm in `mutants/algorithms/` is wrong, and the prover says in which way."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import cast

import pytest

from unisono.collectives.algorithms import AlgorithmFile
from unisono.collectives.verify.prover import AlgorithmError, verify

MUTANTS = sorted(Path(__file__).with_name("algorithms").glob("*.py"))


def load(path: Path) -> ModuleType:
    spec = spec_from_file_location(f"mutant_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", MUTANTS, ids=lambda path: path.stem)
def test_prover_kills_mutant(path: Path) -> None:
    mutant = load(path)

    def prove_small_sizes() -> None:
        for size in range(2, 9):
            verify(mutant.COLLECTIVE, cast(AlgorithmFile, mutant), size)

    with pytest.raises(AlgorithmError, match=mutant.ERROR):
        prove_small_sizes()


def test_mutants_exist() -> None:
    assert len(MUTANTS) >= 20
