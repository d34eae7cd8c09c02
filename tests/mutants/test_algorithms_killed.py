"""Every algorithm in `mutants/algorithms/` is wrong, and the prover says in which way."""

from __future__ import annotations

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import cast

import pytest

from unisono.collectives.algorithms import Algorithm, AlgorithmFile
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
    with pytest.raises(AlgorithmError, match=mutant.ERROR):
        prove_small_sizes(mutant)


def prove_small_sizes(mutant: ModuleType) -> None:
    algorithm = Algorithm(mutant.COLLECTIVE, mutant.__name__, cast(AlgorithmFile, mutant))
    for size in range(2, 9):
        if not algorithm.unsupported(size):
            verify(mutant.COLLECTIVE, algorithm, size)


def test_counterexamples_name_rank_step_and_chunk() -> None:
    named = []
    for path in MUTANTS:
        with pytest.raises(AlgorithmError) as caught:
            prove_small_sizes(load(path))
        if re.search(r"rank \d+ of \d+.*\bstep \d+.*\bchunks? \d+", str(caught.value)):
            named.append(path.stem)
    assert len(named) >= 30
