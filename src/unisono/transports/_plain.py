"""What calls on plain tensors have in common, for the shorter ways of transports: what those of one kind share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unisono.fingerprint import Fingerprint
from unisono.reduction import parse_op
from unisono.tensors import is_plain
from unisono.types import ReduceOp

__all__ = ["PARTED", "REDUCING", "ROOTED", "Key", "fingerprint_of", "given_by", "key_of", "of_barrier"]

ROOTED = frozenset({"broadcast", "gather", "reduce", "scatter"})
PARTED = frozenset({"gather", "scatter"})
"""Those in which only the root gives a list."""
REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single"})
_ALONE = frozenset({"all_reduce", "broadcast", "reduce", "scatter"})
"""Those of which nothing but what is written may be given."""
_LISTS = {
    "all_gather": (True, False),
    "all_to_all": (True, True),
    "gather": (True, False),
    "reduce_scatter": (False, True),
    "scatter": (False, True),
}
"""Whether what is written is a list, and whether what is read is; neither is otherwise."""
_BY_SOURCE = frozenset({"all_gather", "all_gather_single", "all_to_all", "all_to_all_single", "gather"})
"""Those of which what is read has the shape that messages tell."""

Key = tuple[str, str, "int | None", torch.dtype, tuple[int, ...], tuple[int, ...]]
"""Name, operation, root, dtype, and the elements of each tensor that is written, and that is read."""


def key_of(name: str, target: Any, source: Any, op: str, root: int | None) -> Key | None:
    """What is alike in calls of one kind; None if what is given is wrong or not plain, or differs in dtype.

    Args:
        name, target, source, op, root: As `Quick.call` is given them.
    """
    if (root is not None and type(root) is not int) or type(op) not in (str, ReduceOp):
        return None
    if source is None and name in _ALONE and is_plain(target):
        # What is most common goes fastest.
        return name, op, root, target.dtype, (target.numel(),), ()
    dtype, counts = None, []
    for given, listed in zip((target, source), _LISTS.get(name, (False, False)), strict=True):
        tensors = (given,) if not listed else () if given is None and name in PARTED else given
        if type(tensors) not in (tuple, list):
            return None
        for tensor in tensors:
            if not is_plain(tensor) or tensor.dtype is not (dtype or tensor.dtype):
                return None
            dtype = tensor.dtype
        counts.append(tuple([tensor.numel() for tensor in tensors]))
    return None if dtype is None else (name, op, root, dtype, counts[0], counts[1])


def given_by(name: str, target: Any, source: Any) -> torch.Tensor:
    """The tensor of a call whose shape messages tell."""
    given = source if name in _BY_SOURCE else target
    first: torch.Tensor = given if isinstance(given, torch.Tensor) else given[0]
    return first


def fingerprint_of(
    key: Key,
    counts: tuple[int, ...],
    sends: Sequence[int] = (),
    receives: Sequence[int] = (),
    shape: Sequence[int] | None = None,
    site: str | None = None,
) -> Fingerprint:
    """The same as the engine makes of a call that goes the longer way."""
    name, op, root, dtype, *_ = key
    return Fingerprint(
        0,
        name,
        parse_op(op).value if op else None,
        root,
        str(dtype).removeprefix("torch."),
        counts,
        "cpu",
        "native",
        tuple(sends),
        tuple(receives),
        None if shape is None else tuple(shape),
        site,
    )


def of_barrier(site: str | None = None) -> Fingerprint:
    """Likewise of a barrier."""
    return Fingerprint(0, "barrier", ReduceOp.BOR.value, algorithm="native", site=site)
