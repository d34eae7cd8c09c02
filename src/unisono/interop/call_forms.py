"""Converts the arguments of process-group methods from any form that torch accepts to `UnisonoGroup`'s form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from inspect import Parameter, Signature, signature
from operator import index
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["CallForms"]

_BETWEEN = {
    "allreduce": ("op",),
    "broadcast": ("root",),
    "gather": ("root",),
    "reduce": ("root", "op"),
    "reduce_scatter": ("op",),
    "scatter": ("root",),
}
"""For each method, the parameters between the tensors and the timeout in the form without an options object."""
_DEFAULTS = {"root": 0, "op": dist.ReduceOp.SUM, "timeout": None}


class CallForms:
    """The forms in which one method can be called.

    Torch's functions pass lists of tensors and an options object; programs pass single tensors, with root, operation
    and timeout as separate arguments.

    Torch's name for a parameter varies between forms (output, outputTensor, output_tensors). A keyword therefore
    selects the parameter whose name is a prefix of the keyword.

    Attributes:
        lists: Names of the parameters that are lists of tensors.
        optioned: Whether the method takes an options object.
    """

    def __init__(self, method: Callable[..., object]) -> None:
        self._name = method.__name__
        given = [Parameter(p.name, p.kind, default=p.default) for p in signature(method).parameters.values()][1:]
        own = [parameter for parameter in given if parameter.name != "opts"]
        self.lists: list[str] = [p.name for p in own if p.name in ("tensors", "outputs", "inputs")]
        # Try the longest name first, because `output_split_sizes` also starts with `output`.
        self._longest = sorted((p.name for p in own), key=len, reverse=True)
        self.optioned: bool = own != given
        loose = (*_BETWEEN.get(self._name, ()), "timeout") if self.optioned else ()
        self._loose = Signature([*own, *(given[0].replace(name=name, default=_DEFAULTS[name]) for name in loose)])
        self._grouped = Signature(given)

    def arguments(self, args: Sequence[object], keywords: Mapping[str, object]) -> list[Any]:
        """Return the positional arguments of the method; raise `TypeError` for arguments that match no form."""
        named = {
            next((name for name in self._longest if keyword.startswith(name.removesuffix("s"))), keyword): value
            for keyword, value in keywords.items()
            if value is not None
        }
        grouped = "opts" in named or any(hasattr(value, "timeout") for value in args)
        try:
            bound = (self._grouped if grouped else self._loose).bind(*args, **named)
            bound.apply_defaults()
            values = bound.arguments
            if not grouped and self.optioned:
                values["opts"] = _options(**{name: values.pop(name) for name in _DEFAULTS if name in values})
            # Torch omits the outer list either for all arguments or for none.
            single = any(isinstance(values[name], torch.Tensor) for name in self.lists)
            for name in self.lists:
                values[name] = [values[name]] if single else _listed(values[name], name)
        except TypeError as error:
            forms = " or ".join(f"{self._name}{form}" for form in (self._loose, self._grouped))
            raise TypeError(f"{self._name}(): {error}; call {forms}") from None
        return list(values.values())


def _options(root: Any = 0, op: Any = None, timeout: Any = None) -> SimpleNamespace:
    """Return an object with the attribute names of torch's options objects."""
    if not isinstance(op, dist.ReduceOp | dist.ReduceOp.RedOpType | None):
        raise TypeError(f"op is {op!r}, not a ReduceOp")
    if isinstance(timeout, float):
        timeout = timedelta(seconds=timeout)
    if not isinstance(timeout, timedelta | None):
        raise TypeError(f"timeout is {timeout!r}, not a timedelta, or seconds as a float")
    return SimpleNamespace(rootRank=index(root), reduceOp=op, timeout=timeout)


def _listed(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"{name} holds {value!r} where it should hold tensors")
    return [_listed(part, name) if not isinstance(part, torch.Tensor) else part for part in value]
