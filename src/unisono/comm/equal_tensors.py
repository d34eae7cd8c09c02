"""Compares tensors that must be equal on all ranks, bit for bit, by reading them once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from unisono.core.types import CommunicatorLike
from unisono.errors import MismatchError

__all__ = ["assert_equal_tensors", "odd_ranks", "ranks_text", "sides_of", "tensor_hash"]

_CHUNK = 1 << 16
_NAMED = 4
# Words have at most 32 bits, so that the product of a word and an odd 64-bit key depends on every bit of the word.
_WORD = {1: torch.uint8, 2: torch.int16}


def assert_equal_tensors(
    named: Sequence[tuple[str, torch.Tensor]], comm: CommunicatorLike, complaint: str, advice: str
) -> None:
    """Raise `MismatchError` on every rank unless all ranks hold the same elements, bit for bit. Collective.

    Args:
        named: Tensors with their names; names, shapes and dtypes are the same on all ranks.
        comm: Communicator of the ranks to compare.
        complaint, advice: Beginning and end of the error text.
    """
    if not named:
        return
    with torch.no_grad():
        own = torch.stack([tensor_hash(tensor).to(comm.device) for _, tensor in named])
        mine = tensor_hash(own).view(1)
        found = mine.new_empty(comm.size)
        comm.all_gather_single(found, mine)
        if bool((found == found[0]).all()):
            return
        table = own.new_empty((comm.size, len(named)))
        comm.all_gather_single(table, own)
        odd = [odd_ranks(column.tolist()) for column in table.t()]
        wrong = [(name, tensor, ranks) for (name, tensor), ranks in zip(named, odd, strict=True) if ranks]
        listed = [f"{name!r}: {ranks} ({_distance(comm, tensor)})" for name, tensor, ranks in wrong[:_NAMED]]
    more = f"; and {len(wrong) - _NAMED} more, the last of them {wrong[-1][0]!r}" if len(wrong) > _NAMED else ""
    raise MismatchError(f"{complaint}: {'; '.join(listed)}{more}. {advice}", rank=comm.rank, size=comm.size)


def tensor_hash(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 64-bit hash of a tensor's bits and their positions, as a 0-d int64 tensor on the same device.

    Multilinear hashing (Lemire and Kaser: Strongly universal string hashing is fast, 2014): the sum of the words, each
    multiplied by an odd key, modulo 2**64. The hash is independent of strides, but not of the order of elements.

    Example:
        >>> one, other = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
        >>> tensor_hash(one) == tensor_hash(one.clone()), tensor_hash(one) == tensor_hash(other)
        (tensor(True), tensor(False))
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if not tensor.numel():
        return total
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # Viewing elements as words requires stride 1. Unlike view(-1), as_strided gives stride 1 even to a single element.
    flat = dense.as_strided((dense.numel(),), (1,))
    words = flat.view(_WORD.get(flat.itemsize, torch.int32))
    keys = _keys().to(tensor.device)
    turns = random.Random(_CHUNK)
    for chunk in words.split(_CHUNK):
        # Integer overflow wraps around, which gives the sum modulo 2**64.
        total += (chunk * keys[: chunk.numel()]).sum() * _odd(turns)
    return total


def _distance(comm: CommunicatorLike, tensor: torch.Tensor) -> str:
    """Return the largest difference between ranks in any element, as text."""
    values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    low, high = (values.detach().double().clone() for _ in range(2))
    comm.all_reduce(low, "min")
    comm.all_reduce(high, "max")
    distance = (high - low).abs().max().item()
    return f"by up to {distance:.3g}" if distance else "equal as numbers, in other bits"


@cache
def _keys() -> torch.Tensor:
    # Python's random number generator produces the same numbers in every version and on every rank.
    source = random.Random(1)
    return torch.tensor([_odd(source) for _ in range(_CHUNK)])


def _odd(source: random.Random) -> int:
    return source.getrandbits(64) - (1 << 63) | 1


def odd_ranks(values: Sequence[Any]) -> str | None:
    """Return text naming the ranks that differ from the majority; None if all are equal.

    Example:
        >>> odd_ranks([1, 1, 3, 1]), odd_ranks([2, 2])
        ('rank 2 differs from ranks 0, 1, 3', None)
    """
    sides = sides_of(values)
    if len(sides) == 1:
        return None
    most = max(sides.values(), key=len)
    odd = sorted(rank for group in sides.values() if group is not most for rank in group)
    return f"{ranks_text(odd)} differ{'s' if len(odd) == 1 else ''} from {ranks_text(most)}"


def sides_of(values: Sequence[Any]) -> dict[str, list[int]]:
    """Return the ranks that hold each distinct value, keyed by the value as text."""
    sides: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        sides.setdefault(str(value), []).append(rank)
    return sides


def ranks_text(ranks: Sequence[int]) -> str:
    """Return a list of ranks as text."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
