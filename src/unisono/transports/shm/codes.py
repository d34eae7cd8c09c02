"""Numbers of dtypes and reduce operations in shared memory: the same on all ranks, and in src/native."""

from __future__ import annotations

import torch

from unisono.core.types import ReduceOp

__all__ = ["DTYPES", "DTYPE_CODES", "OP_CODES"]

OP_CODES: dict[str, int] = {op.value: code for code, op in enumerate(ReduceOp, 1)}
DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES, 1)}
