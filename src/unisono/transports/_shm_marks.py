"""What ranks compare when they arrive in the first round of a collective: a few numbers."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from unisono.fingerprint import Fingerprint
from unisono.types import Call, ReduceOp

__all__ = ["DTYPES", "DTYPE_CODES", "NAME_CODES", "OP_CODES", "Mark", "mark_for", "schedule_mark"]

_NAMES = "all_gather all_reduce all_to_all barrier broadcast gather reduce reduce_scatter scatter"
NAME_CODES = {name: code for code, name in enumerate(_NAMES.split(), 1)}
OP_CODES: dict[str, int] = {op.value: code for code, op in enumerate(ReduceOp, 1)}
DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES, 1)}

_OFFSET, _PRIME, _WORD = 0xCBF29CE484222325, 0x100000001B3, (1 << 64) - 1
"""Of the FNV-1a hash, by Fowler, Noll and Vo, here over numbers in the place of bytes."""

Mark = tuple[int, int, int, int]


def mark_for(call: Call) -> Mark:
    """That of a native call."""
    tensors = (*call.inputs, *call.outputs)
    counts = [t.numel() for t in (call.outputs if call.name == "all_gather" else call.inputs or call.outputs)]
    if call.name in ("gather", "scatter"):
        counts = counts[:1]
    if call.name == "all_to_all":
        counts = []
    codes = NAME_CODES[call.name]
    if call.asked is not None:
        codes |= OP_CODES[call.asked] << 8
    if tensors:
        codes |= DTYPE_CODES[tensors[0].dtype] << 16
    if call.root is not None:
        codes |= (call.root + 1) << 32
    return codes, sum(counts), _hash_of(counts) if len(counts) > 1 else 0, 0


def _hash_of(counts: Sequence[int]) -> int:
    """Of counts that may be uneven; src/native/bindings.cpp has the same."""
    found = _OFFSET
    for count in counts:
        found = ((found ^ count) * _PRIME) & _WORD
    return found


def schedule_mark(fingerprint: Fingerprint) -> Mark:
    """That of a round before a call, in which more is compared, or after which other ways are gone."""
    digest = zlib.crc32(repr(fingerprint.compared()[1:]).encode())
    return 0xFF << 56, digest, 0, 0
