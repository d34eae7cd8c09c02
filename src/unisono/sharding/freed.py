"""Parameters whose storage is empty: their shape can be read, their elements cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

__all__ = ["FreedParameter", "ShardedGradient", "free", "refill"]

_PROPERTIES = (
    "_backward_hooks _post_accumulate_grad_hooks _version device dtype grad_fn is_cpu is_cuda is_leaf is_meta "
    "is_mps is_nested is_quantized is_sparse is_sparse_csr is_xpu itemsize layout nbytes ndim output_nr "
    "requires_grad shape"
)
_METHODS = (
    "__hash__ __len__ dim element_size is_complex is_contiguous is_floating_point is_inference is_signed nelement "
    "ndimension numel register_hook register_post_accumulate_grad_hook requires_grad_ size storage_offset stride"
)
_METADATA: frozenset[Callable[..., Any]] = frozenset(
    [
        *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES.split()),
        *(getattr(torch.Tensor, name) for name in _METHODS.split()),
        torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
        torch.is_complex,
        torch.is_floating_point,
        torch.is_inference,
        torch.numel,
    ]
)
_GRAD: Any = torch.Tensor.grad
_GRADIENT = (_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__)


class FreedParameter(torch.nn.Parameter):
    """Class of a sharded model's parameter while its elements are on other ranks.

    Reads of shape, dtype and other metadata work. Any other use raises.

    Raises:
        RuntimeError: The elements or the gradient were used; names the parameter.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of metadata; refuse any other."""
        if func not in _METADATA:
            _refuse(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __repr__(self) -> str:  # type: ignore[override]
        """Return text with name and shape."""
        return f"FreedParameter({_name(self)!r}, shape={list(self.shape)}, dtype={self.dtype})"


class ShardedGradient(torch.Tensor):
    """Class of p.grad while each rank has a part of the gradient. Reads of metadata work; any other use raises."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of metadata; refuse any other."""
        if func not in _METADATA:
            raise RuntimeError(
                f"{getattr(func, '__name__', func)} uses p.grad, which is sharded: each rank has a part of it. Use "
                "clip_grad_norm_() of the ShardedOptimizer, or create it with shard_gradients=False"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __repr__(self) -> str:  # type: ignore[override]
        """Return text with the shape."""
        return f"ShardedGradient(shape={list(self.shape)}, dtype={self.dtype})"

    @classmethod
    def of(cls, parameter: torch.Tensor) -> ShardedGradient:
        """Return one for a parameter, without memory of its own."""
        nothing = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
        return nothing.expand(parameter.shape).as_subclass(cls)


def _refuse(func: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> NoReturn:
    name = next(_name(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FreedParameter))
    if func in _GRADIENT:
        raise RuntimeError(
            f"{name!r} has no p.grad, because its model is sharded: each rank has the gradient of its part. "
            "Use optimizer.zero_grad() and sharded.clip_grad_norm_() of the ShardedModel"
        )
    raise RuntimeError(
        f"{name!r} was used while its elements are on other ranks: its model is sharded, and it is whole only while "
        "its own module runs. Use it inside `with sharded.full_parameters():`, or put the modules that use it into "
        "one unit (units=)"
    )


def _name(parameter: torch.Tensor) -> str:
    return str(parameter.__dict__["_sharded_name"])


def free(parameters: Sequence[torch.nn.Parameter], version: int) -> None:
    """Let parameters refuse to be used, and autograd refuse what it has saved of them at another version."""
    for parameter in parameters:
        parameter.__class__ = FreedParameter
    _set_version(parameters, version)


def refill(parameters: Sequence[torch.nn.Parameter], classes: Iterable[type], version: int) -> None:
    """Let parameters be used again.

    Args:
        parameters: Some of a sharded model.
        classes: The class that each had before `free`.
        version: Number of these elements. Autograd uses what it has saved of the parameters at this version.
    """
    for parameter, original in zip(parameters, classes, strict=True):
        parameter.__class__ = original
    _set_version(parameters, version)


def _set_version(parameters: Sequence[torch.nn.Parameter], version: int) -> None:
    torch._C._autograd._unsafe_set_version_counter(tuple(parameters), (version,) * len(parameters))
