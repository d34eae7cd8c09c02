"""Hypothesis strategies for all arguments of collectives. Draw in the driver, and send to the ranks."""

from __future__ import annotations

import torch

from unisono.collectives.algorithms import ALGORITHMS
from unisono.core.collective import COLLECTIVES
from unisono.core.types import ReduceOp
from unisono.errors import UnavailableError
from unisono.testing.cases import CALLS, Case
from unisono.testing.memory_layouts import LAYOUTS
from unisono.testing.reference import DTYPES, ops_for

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise UnavailableError("strategies need Hypothesis: pip install 'unisono[testing]'") from error

__all__ = [
    "algorithms",
    "calls",
    "cases",
    "counts",
    "dtypes",
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
"""As in the worlds of `unisono.testing.conformance`: short tensors are chunked, too."""


def worlds(max_size: int = 8) -> st.SearchStrategy[int]:
    """Numbers of ranks, from 1."""
    return st.integers(1, max_size)


def calls() -> st.SearchStrategy[str]:
    """Names of collective methods of a communicator."""
    return st.sampled_from(CALLS)


def dtypes() -> st.SearchStrategy[torch.dtype]:
    """Floats of 16 to 64 bits, bfloat16, integers of 8 to 64 bits, uint8, bool, complex64."""
    return st.sampled_from(DTYPES)


def ops(dtype: torch.dtype) -> st.SearchStrategy[ReduceOp]:
    """Reduce operations that are defined for this dtype."""
    return st.sampled_from(ops_for(dtype))


def counts(size: int, dtype: torch.dtype = torch.float32, chunk_bytes: int = _CHUNK_BYTES) -> st.SearchStrategy[int]:
    """Numbers of elements, mostly error-prone ones: around the number of ranks and the end of a chunk."""
    special = {0, 1, size - 1, size, size + 1, 1000, chunk_bytes // dtype.itemsize + 1}
    return st.sampled_from(sorted(special)) | st.integers(0, 100)


def layouts() -> st.SearchStrategy[str]:
    """Memory layouts of a tensor; for `unisono.testing.memory_layouts.place`."""
    return st.sampled_from(LAYOUTS)


def roots(size: int) -> st.SearchStrategy[int]:
    """Ranks of a world of this size."""
    return st.integers(0, size - 1)


def algorithms(collective: str) -> st.SearchStrategy[str | None]:
    """None (the backend's own, or the cheapest), or the name of a schedule of this collective."""
    return st.none() | st.sampled_from(ALGORITHMS[collective].names())


def splits(size: int, total: int) -> st.SearchStrategy[list[int]]:
    """`size` lengths that sum to `total`, uneven and some of them zero."""
    cuts = st.lists(st.integers(0, total), min_size=size - 1, max_size=size - 1).map(sorted)
    return cuts.map(lambda cut: [stop - start for start, stop in zip([0, *cut], [*cut, total], strict=True)])


def parts(size: int) -> st.SearchStrategy[list[list[int]]]:
    """Partitions of the ranks of a world into disjoint, non-empty groups, each in some order."""
    colors = st.lists(st.integers(0, 2), min_size=size, max_size=size)
    shuffled = st.permutations(range(size))
    return st.tuples(colors, shuffled).map(
        lambda drawn: [[r for r in drawn[1] if drawn[0][r] == color] for color in sorted(set(drawn[0]))]
    )


def tensors(dtype: torch.dtype, count: int) -> st.SearchStrategy[torch.Tensor]:
    """One-dimensional tensors of any elements, including NaN and infinities."""
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
    """A tensor for each rank, all of the same dtype and length."""
    return st.lists(tensors(dtype, count), min_size=size, max_size=size)


@st.composite
def cases(draw: st.DrawFn, size: int, call: str | None = None, chunk_bytes: int = _CHUNK_BYTES) -> Case:
    """A collective call with all its parameters: see `unisono.testing.cases.Case`.

    Args:
        draw: Passed by Hypothesis.
        size: Number of ranks.
        call: The method; any if None.
        chunk_bytes: Chunk size of the ranks' communicator, for counts that are one over a chunk.

    Example:
        >>> from hypothesis import find
        >>> find(cases(2, "broadcast"), lambda case: case.root == 1).root
        1
    """
    call = draw(calls()) if call is None else call
    dtype = draw(dtypes())
    return Case(
        call,
        size,
        draw(counts(size, dtype, chunk_bytes)),
        dtype,
        draw(ops(dtype)) if COLLECTIVES[call].reduces else ReduceOp.SUM,
        draw(roots(size)) if COLLECTIVES[call].root else 0,
        draw(layouts()),
        draw(algorithms(COLLECTIVES[call].family)),
        async_op=draw(st.booleans()),
        uneven=draw(st.booleans()),
        numbers=draw(st.sampled_from(["whole", "any", "nan"])),
        seed=draw(st.integers(0, 2**32 - 1)),
    )
