"""Hypothesis strategies for all arguments of collectives. Draw values in the driver, and send them to the ranks.

    @given(data=st.data(), size=strategies.worlds(4), dtype=strategies.dtypes())
    def test_all_reduce(data, size, dtype):
        op, count = data.draw(strategies.ops(dtype)), data.draw(strategies.counts(size, dtype))
        given = data.draw(strategies.tensors_per_rank(size, dtype, count))

The examples in the docstrings show the values to which Hypothesis shrinks.
"""

from __future__ import annotations

import torch

from unisono.collectives.algorithms import serving
from unisono.core.collective import COLLECTIVES
from unisono.core.types import ReduceOp
from unisono.errors import UnavailableError
from unisono.host.distribution import install_command
from unisono.testing.cases import CALLS, Case
from unisono.testing.memory_layouts import LAYOUTS
from unisono.testing.reference import DTYPES, ops_for

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise UnavailableError(f"strategies need Hypothesis: {install_command('testing')}") from error

__all__ = [
    "algorithms",
    "calls",
    "cases",
    "counts",
    "dtypes",
    "inputs",
    "layouts",
    "ops",
    "parts",
    "roots",
    "splits",
    "tensors",
    "tensors_per_rank",
    "worlds",
]

_CHUNK_BYTES = 4096
"""Default chunk size, as in `unisono.testing.conformance.World`: small, so that even short tensors are chunked."""


def worlds(max_size: int = 8) -> st.SearchStrategy[int]:
    """Return a strategy for the number of ranks.

    Args:
        max_size: The largest number of ranks; the smallest is 1.

    Example:
        >>> from hypothesis import find
        >>> find(worlds(max_size=4), lambda size: size > 2)
        3
    """
    return st.integers(1, max_size)


def calls() -> st.SearchStrategy[str]:
    """Return a strategy for names of a communicator's collective methods: `unisono.testing.cases.CALLS`.

    Example:
        >>> from hypothesis import find
        >>> find(calls(), lambda call: call.startswith("all"))
        'all_gather'
    """
    return st.sampled_from(CALLS)


def dtypes() -> st.SearchStrategy[torch.dtype]:
    """Return a strategy for dtypes: floats of 16 to 64 bits, bfloat16, signed integers, uint8, bool, complex64.

    Example:
        >>> from hypothesis import find
        >>> find(dtypes(), lambda dtype: dtype.is_complex)
        torch.complex64
    """
    return st.sampled_from(DTYPES)


def ops(dtype: torch.dtype) -> st.SearchStrategy[ReduceOp]:
    """Return a strategy for the reduce operations that are defined for a dtype.

    Args:
        dtype: Any of `unisono.testing.reference.DTYPES`.

    Example:
        >>> from hypothesis import find
        >>> find(ops(torch.int8), lambda op: True).value
        'sum'
    """
    return st.sampled_from(ops_for(dtype))


def counts(size: int, dtype: torch.dtype = torch.float32, chunk_bytes: int = _CHUNK_BYTES) -> st.SearchStrategy[int]:
    """Return a strategy for element counts, mostly around the number of ranks and the chunk size.

    Args:
        size: Number of ranks.
        dtype: Dtype of the elements.
        chunk_bytes: Chunk size of the ranks' communicator, in bytes.

    Example:
        >>> from hypothesis import find
        >>> find(counts(size=2, dtype=torch.float32, chunk_bytes=4096), lambda count: count > 1000)
        1025
    """
    special = {0, 1, size - 1, size, size + 1, 1000, chunk_bytes // dtype.itemsize + 1}
    return st.sampled_from(sorted(special)) | st.integers(0, 100)


def layouts() -> st.SearchStrategy[str]:
    """Return a strategy for a tensor's memory layout, for `unisono.testing.memory_layouts.place`.

    Example:
        >>> from hypothesis import find
        >>> find(layouts(), lambda layout: True)
        'contiguous'
    """
    return st.sampled_from(LAYOUTS)


def roots(size: int) -> st.SearchStrategy[int]:
    """Return a strategy for ranks.

    Args:
        size: Number of ranks.

    Example:
        >>> from hypothesis import find
        >>> find(roots(size=3), lambda root: root > 0)
        1
    """
    return st.integers(0, size - 1)


def algorithms(
    collective: str, size: int | None = None, *, rounded: bool = True, uneven: bool = True
) -> st.SearchStrategy[str | None]:
    """Return a strategy for the argument `algorithm`: None, or the name of an algorithm of a collective.

    Args:
        collective: A key of `unisono.algorithms.ALGORITHMS`, such as "all_reduce".
        size: Number of ranks; if None, only algorithms that work for any number of ranks are drawn.
        rounded: Whether the call adds or multiplies floating-point numbers.
        uneven: Whether lengths may differ between ranks.

    Example:
        >>> from hypothesis import find
        >>> find(algorithms("all_reduce"), lambda name: name == "ring")
        'ring'
    """
    sizes = (3, 5, 6) if size is None else (size,)
    known = [set(serving(collective, size, rounded=rounded, uneven=uneven)) for size in sizes]
    return st.none() | st.sampled_from(sorted(set.intersection(*known)))


def splits(size: int, total: int) -> st.SearchStrategy[list[int]]:
    """Return a strategy for lists of uneven lengths, some of them zero, with a given sum.

    Args:
        size: Number of lengths.
        total: Sum of the lengths.

    Example:
        >>> from hypothesis import find
        >>> find(splits(size=2, total=5), lambda lengths: lengths[0] > 1)
        [2, 3]
    """
    cuts = st.lists(st.integers(0, total), min_size=size - 1, max_size=size - 1).map(sorted)
    return cuts.map(lambda cut: [stop - start for start, stop in zip([0, *cut], [*cut, total], strict=True)])


def parts(size: int) -> st.SearchStrategy[list[list[int]]]:
    """Return a strategy for partitions of the ranks into at most 3 disjoint, non-empty groups, each in some order.

    Args:
        size: Number of ranks.

    Example:
        >>> from hypothesis import find
        >>> find(parts(size=2), lambda groups: len(groups) == 2)
        [[0], [1]]
    """
    colors = st.lists(st.integers(0, 2), min_size=size, max_size=size)
    shuffled = st.permutations(range(size))
    return st.tuples(colors, shuffled).map(
        lambda drawn: [[r for r in drawn[1] if drawn[0][r] == color] for color in sorted(set(drawn[0]))]
    )


def tensors(dtype: torch.dtype, count: int) -> st.SearchStrategy[torch.Tensor]:
    """Return a strategy for one-dimensional CPU tensors with arbitrary elements, including NaN and infinities.

    Args:
        dtype: Any of `unisono.testing.reference.DTYPES`. Floats are drawn from the values of float16.
        count: Number of elements.

    Example:
        >>> from hypothesis import find
        >>> find(tensors(torch.float32, count=2), lambda tensor: bool(tensor.isnan().any())).numel()
        2
    """
    if dtype is torch.bool:
        elements: st.SearchStrategy[bool | int | float | complex] = st.booleans()
    elif dtype.is_complex:
        elements = st.complex_numbers(width=64)
    elif dtype.is_floating_point:
        # Every 16-bit float is representable in each wider dtype.
        elements = st.floats(width=16)
    else:
        info = torch.iinfo(dtype)
        elements = st.integers(info.min, info.max)
    return st.lists(elements, min_size=count, max_size=count).map(lambda values: torch.tensor(values, dtype=dtype))


def tensors_per_rank(size: int, dtype: torch.dtype, count: int) -> st.SearchStrategy[list[torch.Tensor]]:
    """Return a strategy for lists of tensors, one per rank, all of the same dtype and length.

    Args:
        size: Number of ranks.
        dtype, count: As in `tensors`.

    Example:
        >>> from hypothesis import find
        >>> find(tensors_per_rank(2, torch.int64, count=1), lambda tensors: True)
        [tensor([0]), tensor([0])]
    """
    return st.lists(tensors(dtype, count), min_size=size, max_size=size)


@st.composite
def inputs(
    draw: st.DrawFn, max_size: int = 4, dtype: torch.dtype = torch.int64, max_count: int = 16
) -> list[torch.Tensor]:
    """Return a strategy for lists of equally long tensors, one per rank.

    Hypothesis shrinks both the number of tensors and their length.

    With `@pytest.mark.ranks("inputs")`, a test runs on one rank per tensor in its argument `inputs`, which this
    strategy draws.

    Args:
        draw: Passed by Hypothesis.
        max_size: The largest number of ranks.
        dtype: As in `tensors`. With integers, sums and products do not depend on the order of reduction, because
            overflow wraps around.
        max_count: The largest number of elements.

    Example:
        >>> from hypothesis import find
        >>> find(inputs(), lambda drawn: len(drawn) > 1 and len(drawn[0]) > 0)
        [tensor([0]), tensor([0])]
    """
    size = draw(worlds(max_size))
    return draw(tensors_per_rank(size, dtype, draw(st.integers(0, max_count))))


@st.composite
def cases(draw: st.DrawFn, size: int, call: str | None = None, chunk_bytes: int = _CHUNK_BYTES) -> Case:
    """Return a strategy for collective calls with all their parameters: see `unisono.testing.cases.Case`.

    Args:
        draw: Passed by Hypothesis.
        size: Number of ranks.
        call: The collective's method; any collective if None.
        chunk_bytes: Chunk size of the ranks' communicator, used to draw counts just above one chunk.

    Example:
        >>> from hypothesis import find
        >>> find(cases(2, "broadcast"), lambda case: case.root == 1).root
        1
    """
    call = draw(calls()) if call is None else call
    dtype = draw(dtypes())
    uneven = draw(st.booleans())
    op = draw(ops(dtype)) if COLLECTIVES[call].reduces else ReduceOp.SUM
    exact = op not in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT) or not (
        dtype.is_floating_point or dtype.is_complex
    )
    return Case(
        call,
        size,
        draw(counts(size, dtype, chunk_bytes)),
        dtype,
        op,
        draw(roots(size)) if COLLECTIVES[call].root else 0,
        draw(layouts()),
        draw(algorithms(COLLECTIVES[call].family, size, rounded=not exact, uneven=uneven)),
        async_op=draw(st.booleans()),
        uneven=uneven,
        numbers=draw(st.sampled_from(["whole", "any", "nan"])),
        seed=draw(st.integers(0, 2**32 - 1)),
    )
