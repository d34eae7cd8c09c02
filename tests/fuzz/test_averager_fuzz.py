"""Whatever programs do in and around backward passes, averaged gradients are those that one process computes.

A failure names its seed, and the command that runs it again. `make soak` runs 6,000 programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from unittest.mock import patch

import pytest
from averager_fuzzing import failures
from averager_mutants import MUTANTS
from averager_reference import ReferenceAverager

from unisono.utils import backward_pass

pytestmark = pytest.mark.filterwarnings(
    # Torch warns of the reference cycles that create_graph=True makes, of checkpoints in an evaluation, of gradients
    # with other strides than their parameter, and when it compiles a hook that looks at the model's result.
    "ignore:Using backward:UserWarning",
    "ignore:None of the inputs have requires_grad:UserWarning",
    "ignore:grad and param do not obey the gradient layout contract:UserWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    # Dynamo breaks the graph at a new thread.
    "ignore:Dynamo does not know how to trace the builtin `_thread:UserWarning",
)

# Fifteen programs meet most mutants, and few more of them another backend or number of ranks.
SHORT = [("shm", 2, 15), ("shm", 3, 4), ("thread", 3, 3), ("gloo", 2, 2)]
ORACLE = [("thread", 2, 10), ("thread", 3, 6), ("shm", 2, 20), ("shm", 3, 10), ("gloo", 2, 4), ("gloo", 3, 2)]
LONG = [("thread", 200), ("shm", 200), ("gloo", 100)]
SIZES = pytest.mark.parametrize("size", [2, 3])
MOST = 2  # Failures, each of which may take as long as a timeout.


def check(found: Iterator[str]) -> None:
    texts = list(islice(found, MOST))
    assert not texts, "\n\n".join(texts)


@pytest.mark.parametrize(("backend", "size", "count"), SHORT)
def test_gradients_of_random_programs(backend: str, size: int, count: int) -> None:
    check(failures(range(count), backend, size))


def test_several_averagers_fail_as_one() -> None:
    """Two of three ranks had a bucket of the second averager in flight when the third one failed."""
    check(failures([51], "gloo", 3))


@pytest.mark.soak
def test_gradients_of_compiled_models() -> None:
    check(failures(range(5), "thread", 2, compiled=True))


@pytest.mark.soak
@SIZES
@pytest.mark.parametrize("block", range(6))
@pytest.mark.parametrize(("backend", "count"), LONG)
def test_gradients_of_many_random_programs(backend: str, count: int, block: int, size: int) -> None:
    first = 1000 * block
    check(failures(range(first, first + count), backend, size))


@pytest.mark.soak
@pytest.mark.parametrize("block", range(10))
def test_gradients_of_many_compiled_models(block: int) -> None:
    first = 1000 + 20 * block
    check(failures(range(first, first + 20), "thread", 2, compiled=True))


@pytest.mark.soak
@pytest.mark.parametrize(("backend", "size", "count"), ORACLE)
def test_reference_is_correct(backend: str, size: int, count: int) -> None:
    """A failure of the fuzzer's own oracle shows here."""
    check(failures(range(count), backend, size, make=ReferenceAverager))


@pytest.mark.soak
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_found(mutant: type[ReferenceAverager]) -> None:
    assert next(failures(range(1000), "thread", 2, make=mutant), None) is not None


@pytest.mark.soak
def test_passes_of_several_averagers_that_end_in_the_order_of_the_graph_are_found() -> None:
    with patch.object(backward_pass, "_in_order", lambda _: 0):
        assert next(failures(range(1000), "thread", 2), None) is not None
