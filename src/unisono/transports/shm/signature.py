"""Call signature: a few numbers that ranks compare in the first round of a collective."""

from __future__ import annotations

import torch

from unisono.core.collective import FAMILIES
from unisono.core.fingerprint import hash_of
from unisono.core.tensors import numels
from unisono.core.types import CollectiveCall, ReduceOp

__all__ = ["DTYPES", "DTYPE_CODES", "OP_CODES", "Signature", "signature_of"]

OP_CODES: dict[str, int] = {op.value: code for code, op in enumerate(ReduceOp, 1)}
DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES, 1)}

Signature = tuple[int, int, int, int]


def signature_of(call: CollectiveCall) -> Signature:
    """Return the signature of a call without the native core, which makes signatures of its own."""
    read, written = numels(call.inputs), numels(call.outputs)
    dtype = next((t.dtype for t in (*call.inputs, *call.outputs)), None)
    counts = FAMILIES[call.name].compared_counts(read, written)
    return hash_of((call.name, call.requested_op, dtype, call.root, counts)), 0, 0, 0
