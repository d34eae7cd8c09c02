"""Every codec in `mutants/codecs/` is wrong in one way, and a check says in which."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from assertions import assertion_of
from loading import load, mutants
from pairwise import short

from unisono.compression import CODECS
from unisono.testing import codecs, run_ranks
from unisono.testing.codecs import Bucket, Make

MUTANTS = mutants("codecs")
SIZE = 3
BUCKET = Bucket([(70, 50), (129,)], torch.float32, "mixed", seed=1)


def run_check(check: str, make: Make, bucket: Bucket = BUCKET) -> None:
    """One check, as `check_codec` and the tests of feedback apply it."""
    if check == "check_bytes":
        codecs.check_bytes(make, SIZE, bucket)
    elif check == "check_feedback":
        run_ranks(lambda comm: codecs.check_feedback(make, comm, Bucket([(8, 5)], torch.float64), 128), SIZE)
    else:
        run_ranks(lambda comm: getattr(codecs, check)(make, comm, bucket), SIZE)


@pytest.mark.parametrize("path", MUTANTS, ids=lambda path: path.stem)
def test_conformance_kills_mutant(path: Path) -> None:
    mutant = load(path)
    # What is wrong with some shows in a certain bucket only.
    shapes, numbers = getattr(mutant, "SHAPES", BUCKET.shapes), getattr(mutant, "NUMBERS", BUCKET.numbers)
    bucket = replace(BUCKET, shapes=shapes, numbers=numbers)
    with pytest.raises(AssertionError, match=mutant.ERROR):
        run_check(mutant.CHECK, mutant.CODEC, bucket)


CHECKED = sorted({load(path).CHECK for path in MUTANTS})


# The conformance tests apply the checks to every codec, and that of feedback takes long.
@short("name,check", product(CODECS.names(), CHECKED), [("int8", c) for c in CHECKED if c != "check_feedback"])
def test_correct_implementations_survive(name: str, check: str) -> None:
    assert assertion_of(run_check, check, CODECS[name]) == ""


def test_every_conformance_test_kills_a_mutant() -> None:
    checks = {name for name in codecs.__all__ if name.startswith("check_")} - {"check_codec"}
    assert {load(path).CHECK for path in MUTANTS} == checks
