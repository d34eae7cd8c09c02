"""Averages by multiplication are bitwise equal to those by division."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.tensors import divide

_WHOLE = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


@pytest.mark.parametrize("dtype", _WHOLE, ids=str)
@given(bits=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20), size=st.integers(1, 4096))
def test_average_equals_division_bitwise(dtype: torch.dtype, bits: list[int], size: int) -> None:
    whole = torch.tensor(bits).view(_WHOLE[dtype])
    found, wanted = whole.clone().view(dtype), whole.view(dtype) / size
    divide(found, size)
    assert torch.equal(found.isnan(), wanted.isnan())
    # The payload of a NaN does not matter.
    assert torch.equal(found.nan_to_num_(0.5).view(_WHOLE[dtype]), wanted.nan_to_num_(0.5).view(_WHOLE[dtype]))


def test_complex_numbers_are_divided() -> None:
    total = torch.tensor([4 + 2j, complex(torch.inf, 0)])
    divide(total, 2)
    assert total[0] == 2 + 1j
    assert total[1].real == torch.inf
