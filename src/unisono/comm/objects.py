"""Serializes Python values, without pickle unless the caller trusts its peers."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from unisono import serialization
from unisono.core.failure import text_of
from unisono.core.tensors import view_of
from unisono.serialization.functions import dumps

__all__ = ["check_sent", "decode", "encode", "encode_each"]

_PLAIN = b"\0"
_PICKLED = b"\1"
_REFUSED = b"\2"
_WRONG = b"\3"
_REASONS: dict[bytes, type[Exception]] = {_REFUSED: TypeError, _WRONG: ValueError}
"""Exceptions to raise if an error arrives instead of a value."""


def encode_each(objs: Sequence[Any] | None, rank: int, size: int, trusted: bool) -> list[bytes]:
    """Return each rank's bytes; if any value cannot be sent, every rank's bytes contain the reason."""
    try:
        values = [] if objs is None else list(objs)
    except TypeError:
        # `objs` is not iterable; the check of its length below reports this error to all ranks.
        values = []
    parts = [encode(value, rank, trusted) for value in values]
    if len(parts) != size:
        wrong = f"objs on rank {rank} must have one value for each of the {size} ranks, not {len(parts)}"
        return [_WRONG + wrong.encode()] * size
    return [next((p for p in parts if p[:1] == _REFUSED), part) for part in parts]


def encode(obj: Any, rank: int, trusted: bool) -> bytes:
    """Return a value's bytes; if it cannot be sent, encode the reason, so that receivers get an error."""
    try:
        return _PICKLED + dumps(obj) if trusted else _PLAIN + serialization.encode(obj)
    except Exception as error:
        reason = f"rank {rank} has a value that cannot be sent: {text_of(error)}"
        return _REFUSED + reason.encode(errors="replace")


def check_sent(data: bytes) -> None:
    """Raise an error if the encoded `data` contains the reason why a value could not be sent."""
    if data[:1] in _REASONS:
        raise _REASONS[data[:1]](data[1:].decode(errors="replace"))


def decode(buffer: torch.Tensor, trusted: bool) -> Any:
    """Return the value encoded in received bytes; raise `ValueError` for an untrusted pickle."""
    here = buffer.cpu()
    data = bytes(view_of(here)) if here.numel() else b""
    if data[:1] == _PLAIN:
        return serialization.decode(data[1:])
    check_sent(data)
    if data[:1] != _PICKLED or not trusted:
        raise ValueError("a rank sent a pickled value; pass trusted=True on every rank if you trust them all")
    return pickle.loads(data[1:])
