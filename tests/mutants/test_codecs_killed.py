"""Every codec in `mutants/codecs/` is wrong in one way, and a law says in which."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loading import load, mutants
from verdict import complaint

from unisono.compression import CODECS
from unisono.testing import codecs, run_ranks
from unisono.testing.codecs import Bucket, Make

MUTANTS = mutants("codecs")
SIZE = 3
BUCKET = Bucket([(70, 50), (129,)], torch.float32, "mixed", seed=1)


def obey(law: str, make: Make, bucket: Bucket = BUCKET) -> None:
    """One law, as `check_codec` and the tests of feedback apply it."""
    if law == "check_bytes":
        codecs.check_bytes(make, SIZE, bucket)
    elif law == "check_feedback":
        run_ranks(lambda comm: codecs.check_feedback(make, comm, Bucket([(8, 5)], torch.float64), 128), SIZE)
    else:
        run_ranks(lambda comm: getattr(codecs, law)(make, comm, bucket), SIZE)


@pytest.mark.parametrize("path", MUTANTS, ids=lambda path: path.stem)
def test_conformance_kills_mutant(path: Path) -> None:
    mutant = load(path)
    # What is wrong with some shows in a certain bucket only.
    shapes, numbers = getattr(mutant, "SHAPES", BUCKET.shapes), getattr(mutant, "NUMBERS", BUCKET.numbers)
    bucket = replace(BUCKET, shapes=shapes, numbers=numbers)
    with pytest.raises(AssertionError, match=mutant.COMPLAINT):
        obey(mutant.LAW, mutant.CODEC, bucket)


# That feedback converges is among the tests of the laws themselves, and takes long.
@pytest.mark.parametrize(
    "law",
    [
        pytest.param(law, marks=[pytest.mark.soak] * (law == "check_feedback"))
        for law in sorted({load(path).LAW for path in MUTANTS})
    ],
)
@pytest.mark.parametrize("name", CODECS.names())
def test_correct_implementations_survive(name: str, law: str) -> None:
    assert complaint(obey, law, CODECS[name]) == ""


def test_every_conformance_test_kills_a_mutant() -> None:
    laws = {name for name in codecs.__all__ if name.startswith("check_")} - {"check_codec"}
    assert {load(path).LAW for path in MUTANTS} == laws
