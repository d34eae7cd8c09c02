"""Claims of parameters: gradients of a parameter are handled by one averager or sharded model at a time."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from unisono.utils.bucket_plan import Named

__all__ = ["check_unclaimed", "claim", "release"]

_OWNERS = WeakTensorKeyDictionary()


def claim(named: Named, how: str, owner: str) -> None:
    """Claim parameters until `release`.

    Args:
        named: Parameters, with their names.
        how: Verb of what is done to them, such as "averaged".
        owner: Class of the object that does it.

    Raises:
        ValueError: One is claimed already; names it. None is claimed then.

    Example:
        >>> from unisono.utils.claims import claim
        >>> model = torch.nn.Linear(2, 1)
        >>> claim(list(model.named_parameters()), "averaged", "GradientAverager")
        >>> claim(list(model.named_parameters()), "sharded", "ShardedModel")
        Traceback (most recent call last):
        ...
        ValueError: 'weight' is averaged by another GradientAverager; call its remove() first
    """
    check_unclaimed(named)
    for _, parameter in named:
        _OWNERS[parameter] = f"{how} by another {owner}"


def check_unclaimed(named: Named) -> None:
    """`ValueError` if one of these parameters is claimed."""
    for name, parameter in named:
        if parameter in _OWNERS:
            raise ValueError(f"{name!r} is {_OWNERS[parameter]}; call its remove() first")


def release(parameters: Iterable[torch.Tensor]) -> None:
    """Release claims. Idempotent."""
    for parameter in parameters:
        _OWNERS.pop(parameter, None)
