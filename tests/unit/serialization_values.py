"""Values of every kind that can be sent, and classes of some."""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
from typing import Any, NamedTuple

import hypothesis.strategies as st
import torch


class Colour(enum.Enum):
    RED = "r"
    BLUE = ("b", 2)


class Right(enum.Flag):
    READ = 1
    WRITE = 2


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Plain:
    x: Any
    y: Any = 0

    def __post_init__(self) -> None:
        if self.x == "explode":
            raise AssertionError("a constructor was run")


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any


numbers = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
words = st.text(st.characters()) | st.binary() | st.binary().map(bytearray)
hashable = st.recursive(
    numbers | st.text() | st.binary() | st.sampled_from([*Colour, Right.READ | Right.WRITE, Right(0)]),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3) | st.builds(Frozen, inner),
    max_leaves=5,
)
optional = st.none() | st.integers()
values = st.recursive(
    hashable
    | words
    | st.sampled_from([torch.float16, torch.device("cuda:3"), torch.Size([2, 0])])
    | st.slices(10)
    | st.builds(slice, optional, st.text(), optional)
    | st.builds(range, st.integers(), st.integers(), st.integers(1)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.sets(hashable, max_size=4)
        | st.dictionaries(hashable, inner, max_size=4)
        | st.dictionaries(st.text(), inner, max_size=4).map(collections.OrderedDict)
        | st.builds(Plain, inner, inner)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=12,
)
tensors = st.builds(
    lambda dtype, shape: torch.arange(math.prod(shape)).to(dtype).reshape(shape),
    st.sampled_from(
        [torch.float32, torch.bfloat16, torch.int8, torch.uint16, torch.bool, torch.complex64, torch.int64]
    ),
    st.lists(st.integers(0, 3), max_size=3),
)
