"""Numbers that Python and the native core both have are the same."""

from __future__ import annotations

import pytest

from unisono.core.collective import FAMILIES
from unisono.core.numbers import MESSAGE_HEADER, Status
from unisono.core.types import ReduceOp
from unisono.host.native import native

CORE = native()


@pytest.mark.skipif(CORE is None, reason="no compiler was here when unisono was installed")
def test_core_has_the_same_numbers() -> None:
    assert CORE is not None
    assert {status.name: int(status) for status in Status} == CORE.STATUSES
    assert MESSAGE_HEADER == CORE.MESSAGE_HEADER


@pytest.mark.skipif(CORE is None, reason="no compiler was here when unisono was installed")
def test_core_numbers_every_collective_and_operation() -> None:
    assert CORE is not None
    assert CORE.COLLECTIVES.keys() == FAMILIES.keys()
    assert CORE.REDUCE_OPS.keys() == {op.value for op in ReduceOp}
    for numbers in (CORE.COLLECTIVES, CORE.REDUCE_OPS):
        # 0 stands for none.
        assert sorted(numbers.values()) == list(range(1, len(numbers) + 1))
