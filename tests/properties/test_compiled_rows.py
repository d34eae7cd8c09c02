"""Rows of memory are summed in one compiled pass as torch sums them one after another, to the last bit."""

from __future__ import annotations

import pytest
import torch
from compiled_kit import both
from hypothesis import given
from hypothesis import strategies as st

from unisono.compiled import part

sum_rows = part("sum_rows")


def in_turn(rows: torch.Tensor, divisor: int) -> torch.Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total / divisor


@both
@given(
    dtype=st.sampled_from([torch.float32, torch.float64]),
    size=st.integers(1, 6),
    first=st.integers(0, 5),
    count=st.one_of(st.integers(0, 40), st.sampled_from([4095, 40_001])),
    divisor=st.sampled_from([1, 2, 3, 4, 5, 6, 7]),
    seed=st.integers(0, 100),
    odd=st.sampled_from([None, torch.inf, torch.nan, -0.0, 1e-45, 3e38]),
)
def test_rows_become_their_sum_and_what_is_beside_them_stays(
    dtype: torch.dtype, size: int, first: int, count: int, divisor: int, seed: int, odd: float | None
) -> None:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(size, first + count + 3, dtype=dtype, generator=generator)
    if odd is not None:
        table[torch.rand(table.shape, generator=generator) < 0.3] = odd
    expected = table.clone()
    expected[:, first : first + count] = in_turn(table[:, first : first + count], divisor)

    start = table.data_ptr() + first * dtype.itemsize
    sum_rows(start, table.stride(0) * dtype.itemsize, size, count, dtype.itemsize, divisor)

    assert torch.equal(table.isnan(), expected.isnan())
    bits = {torch.float32: torch.int32, torch.float64: torch.int64}[dtype]
    numbers = ~expected.isnan()
    assert torch.equal(table.view(bits)[numbers], expected.view(bits)[numbers])


@both
@pytest.mark.parametrize("wrong", [(0, 1, 4, 1), (1, -1, 4, 1), (1, 1, 2, 1), (1, 1, 4, 0)])
def test_no_rows_and_no_numbers_are_refused(wrong: tuple[int, int, int, int]) -> None:
    size, count, width, divisor = wrong
    with pytest.raises(ValueError, match="floats or doubles"):
        sum_rows(torch.zeros(4).data_ptr(), 4, size, count, width, divisor)
