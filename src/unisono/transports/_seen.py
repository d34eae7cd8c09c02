"""Whether tensors are those of an earlier call, and as they were: what was found out about them still holds then."""

from __future__ import annotations

import weakref
from typing import Any

import torch

__all__ = ["Seen", "lasting", "same", "seen"]

Seen = Any
"""What is remembered of None, of a tensor, or of a list of these. It holds nothing alive."""


def seen(given: Any) -> Seen:
    """To be remembered of tensors that are plain (see `is_plain`) and `lasting`.

    Example:
        >>> tensor = torch.zeros(2, 3)
        >>> known = seen(tensor)
        >>> same(known, tensor), same(known, torch.zeros(2, 3)), same(known, tensor.t_())
        (True, False, False)
    """
    if given is None:
        return None
    if isinstance(given, torch.Tensor):
        return weakref.ref(given), given.data_ptr(), given.numel(), given.dtype
    return [seen(one) for one in given]


def lasting(given: Any) -> bool:
    """Whether all that can change of tensors can be seen.

    Those of inference mode can become unwritable, and complex ones views that are to be conjugated, without a sign.
    """
    if given is None:
        return True
    if isinstance(given, torch.Tensor):
        return not (given.is_complex() or given.is_inference())
    return all(map(lasting, given))


def same(known: Seen, given: Any) -> bool:
    """Whether it is what was seen: all that can change of such a tensor is looked at, but its elements.

    src/compiled/seen.c does the same.
    """
    if known is None:
        return given is None
    if type(known) is list:
        return type(given) in (list, tuple) and len(given) == len(known) and all(map(same, known, given))
    ref, address, count, dtype = known
    return (
        ref() is given
        and given.data_ptr() == address
        and given.numel() == count
        and given.dtype is dtype
        and given.is_contiguous()
        and not given.requires_grad
        and not given.is_neg()
    )
