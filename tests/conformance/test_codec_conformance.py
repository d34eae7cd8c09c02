"""Every codec of the registry meets the checks, unasked."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pairwise import short

from unisono.compression import CODECS
from unisono.compression.codec import DTYPES
from unisono.testing import run_ranks
from unisono.testing.codecs import NUMBERS, Bucket, check_bytes, check_codec, check_feedback

NAMES = CODECS.names()
SHAPES = st.lists(
    st.one_of(st.just(()), st.tuples(st.integers(0, 9)), st.tuples(st.integers(1, 40), st.integers(1, 30))), max_size=4
)
BUCKETS = st.builds(
    Bucket, shapes=SHAPES, dtype=st.sampled_from(DTYPES), numbers=st.sampled_from(NUMBERS), seed=st.integers(0, 999)
)


@pytest.mark.parametrize("name", NAMES)
@given(size=st.integers(1, 8), bucket=BUCKETS)
@example(size=4, bucket=Bucket([(70, 40), (129,)], torch.float32, "mixed"))
@example(size=3, bucket=Bucket([()], torch.float16, "huge"))
@example(size=2, bucket=Bucket([], torch.float32))
@settings(max_examples=max(1, settings.default.max_examples // 10))
def test_conformance(name: str, size: int, bucket: Bucket) -> None:
    check_codec(CODECS[name], size, bucket)


# One of fewer bits and one of fewer elements, for half as many steps, in which each mutant of feedback is killed.
SHORT = [("sparse", "int8", 128), ("sparse", "topk", 128)]


@short("numbers,name,steps", [*SHORT, *product(("sparse", "normal"), NAMES, (256,))], SHORT)
def test_error_feedback_converges(name: str, numbers: str, steps: int) -> None:
    bucket = Bucket([(8, 5)], torch.float64, numbers, seed=3)
    run_ranks(lambda comm: check_feedback(CODECS[name], comm, bucket, steps), 3)


@pytest.mark.parametrize("name", NAMES)
def test_compressed_size_of_a_long_bucket(name: str) -> None:
    check_bytes(CODECS[name], 4, Bucket([(300, 500), (777,)]))


def test_codecs_are_registered() -> None:
    assert {"fp16", "bf16", "int8", "int4", "topk", "randomk", "powersgd", "onebit", "error_feedback"} <= set(NAMES)
