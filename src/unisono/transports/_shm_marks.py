"""What ranks compare when they arrive in the first round of a collective: a few numbers."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from unisono.fingerprint import Fingerprint
from unisono.types import Call, ReduceOp

__all__ = ["Mark", "mark_for", "mark_of", "schedule_mark"]

_NAMES = "all_gather all_reduce all_to_all barrier broadcast gather reduce reduce_scatter scatter"
_NAME_CODES = {name: code for code, name in enumerate(_NAMES.split(), 1)}
_OP_CODES = {op: code for code, op in enumerate(ReduceOp, 1)}
_DTYPE_CODES = {
    dtype: code
    for code, dtype in enumerate(
        sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str),
        1,
    )
}

Mark = tuple[int, int, int, int]


def mark_of(
    name: str, op: ReduceOp | None, dtype: torch.dtype | None, root: int | None, counts: Sequence[int], extra: int = 0
) -> Mark:
    """What ranks compare when they arrive: a word of codes, the elements, and a sum over uneven counts."""
    codes = _NAME_CODES[name]
    if op is not None:
        codes |= _OP_CODES[op] << 8
    if dtype is not None:
        codes |= _DTYPE_CODES[dtype] << 16
    if root is not None:
        codes |= (root + 1) << 32
    uneven = zlib.crc32(repr(tuple(counts)).encode()) if len(counts) > 1 else 0
    return codes, sum(counts), uneven, extra


def mark_for(call: Call) -> Mark:
    """That of a native call."""
    tensors = (*call.inputs, *call.outputs)
    counts = [t.numel() for t in (call.outputs if call.name == "all_gather" else call.inputs or call.outputs)]
    if call.name in ("gather", "scatter"):
        counts = counts[:1]
    if call.name == "all_to_all":
        counts = []
    return mark_of(call.name, call.asked, tensors[0].dtype if tensors else None, call.root, counts)


def schedule_mark(fingerprint: Fingerprint) -> Mark:
    """That of a round before a call, in which more is compared, or after which other ways are gone."""
    digest = zlib.crc32(repr(fingerprint.compared()[1:]).encode())
    return 0xFF << 56, digest, 0, 0
