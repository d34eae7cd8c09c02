"""Claims of parameters: gradients of a parameter are handled by one averager or sharded model at a time."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakValueDictionary

import torch

from unisono.utils.bucket_plan import Named

__all__ = ["ParameterClaim", "check_unclaimed", "claim", "release"]


class ParameterClaim:
    """Claim of parameters, which it keeps alive; it ends when its owner does."""

    def __init__(self, named: Named, text: str) -> None:
        self.named = named
        self.text = text


_CLAIMS: WeakValueDictionary[int, ParameterClaim] = WeakValueDictionary()
"""By the id of each parameter. A weak reference to a parameter would keep torch from swapping it."""


def claim(named: Named, how: str, owner: str) -> ParameterClaim:
    """Claim parameters until `release`, or until the returned claim is dropped.

    Args:
        named: Parameters, with their names.
        how: Verb of what is done to them, such as "averaged".
        owner: Class of the object that does it.

    Returns: The claim, which the owner keeps.

    Raises:
        ValueError: One is claimed already; names it. None is claimed then.

    Example:
        >>> from unisono.utils.claims import claim
        >>> model = torch.nn.Linear(2, 1)
        >>> kept = claim(list(model.named_parameters()), "averaged", "GradientAverager")
        >>> claim(list(model.named_parameters()), "sharded", "ShardedModel")
        Traceback (most recent call last):
        ...
        ValueError: 'weight' is averaged by another GradientAverager; call its remove() first
    """
    check_unclaimed(named)
    found = ParameterClaim(named, f"{how} by another {owner}")
    for _, parameter in named:
        _CLAIMS[id(parameter)] = found
    return found


def check_unclaimed(named: Named) -> None:
    """`ValueError` if one of these parameters is claimed."""
    for name, parameter in named:
        if found := _CLAIMS.get(id(parameter)):
            raise ValueError(f"{name!r} is {found.text}; call its remove() first")


def release(parameters: Iterable[torch.Tensor]) -> None:
    """Release claims. Idempotent."""
    for parameter in parameters:
        _CLAIMS.pop(id(parameter), None)
