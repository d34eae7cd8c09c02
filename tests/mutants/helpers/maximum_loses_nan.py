"""Orders numbers above NaN, as most hardware does."""

from __future__ import annotations

import pytest
import torch

from unisono.core import tensors
from unisono.core.types import ReduceOp

CHECK = "every_op_and_dtype_equals_reference"
ERROR = r"op=<ReduceOp.MAX(.|\n)*not nan"


def put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tensors.COMBINE, ReduceOp.MAX, torch.fmax)
