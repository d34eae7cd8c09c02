"""Sharded data parallelism by hooks on a plain model (ZeRO-3)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.checkpoint.tensor_shard import TensorShard
from unisono.communicator import Communicator
from unisono.sharding.comms import ShardComms
from unisono.sharding.partition import UnitPolicy, partition
from unisono.sharding.runtime import Runtime
from unisono.sharding.shard_optimizer import Piece, ShardOptimizer, shard_optimizer
from unisono.sharding.unit import make_units
from unisono.utils.bucket_plan import agree_on_parameters
from unisono.utils.claims import claim, release
from unisono.utils.flatten import share

__all__ = ["ShardedModel"]


class ShardedModel:
    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        *,
        units: UnitPolicy = None,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        init_sync: bool = True,
    ) -> None:
        named = _shardable(model)
        plans = partition(model, units)
        self._model, self._parameters = model, [p for _, p in named]
        self._comms = ShardComms(comm)
        settings = [[unit.name for unit in plans], param_dtype, reduce_dtype]
        agree_on_parameters(named, self._comms.data, settings)
        claim(named, "sharded", "ShardedModel")
        if init_sync:
            share([*named, *model.named_buffers()], self._comms.data)
        self._units = make_units(plans, self._comms, param_dtype, reduce_dtype)
        self._flats = [flat for unit in self._units for flat in unit.flats]
        pieces = {id(p): piece for flat in self._flats for p, piece in zip(flat.parameters, flat.pieces, strict=True)}
        # In the order of the model's parameters, which is that of an unsharded optimizer.
        self._pieces: dict[int, Piece] = {id(p): pieces[id(p)] for p in self._parameters}
        self._runtime = Runtime(self._units, self._comms)
        self._runtime.hook()

    # -- training -------------------------------------------------------------------------------
    def optimizer(
        self,
        optimizer_class: type[Optimizer],
        params: Iterable[torch.Tensor] | Iterable[Mapping[str, Any]] | None = None,
        *,
        elementwise: bool = False,
        **defaults: Any,
    ) -> ShardOptimizer:
        given = list(self._parameters if params is None else params)
        groups = given if given and isinstance(given[0], Mapping) else [{"params": given}]
        cut = [{**group, "params": [self._piece(p) for p in group["params"]]} for group in groups]
        optimizer = shard_optimizer(optimizer_class, cut, elementwise=elementwise, **defaults)
        optimizer.register_step_pre_hook(lambda *_: self._runtime.check_reduced("optimizer.step()"))
        optimizer.register_step_post_hook(lambda *_: self._runtime.changed())
        return optimizer

    def _piece(self, parameter: torch.Tensor) -> Piece:
        if id(parameter) not in self._pieces:
            raise ValueError("params holds a tensor that is no parameter of the sharded model")
        return self._pieces[id(parameter)]

    def zero_grad(self) -> None:
        for flat in self._flats:
            for piece in flat.pieces:
                piece.tensor.grad = None
            if flat.gradient is not None:
                flat.gradient.drop()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        self._runtime.check_reduced("clip_grad_norm_()")
        grads = [piece.tensor.grad for piece in self._pieces.values() if piece.tensor.grad is not None]
        here = nn.utils.get_total_norm([g for g in grads if len(g)], norm_type).double()
        infinite = norm_type == float("inf")
        total = here.clone() if infinite else here**norm_type
        self._comms.data.all_reduce(total, "max" if infinite else "sum")
        total = total if infinite else total ** (1.0 / norm_type)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(f"the gradients' total norm is {total.item()}, so they cannot be clipped")
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(factor.to(grad.device))
        return total

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._runtime.sync = self._runtime.sync, False
        try:
            yield
        finally:
            self._runtime.sync = before

    # -- the whole model ------------------------------------------------------------------------
    @contextmanager
    def full_parameters(self, *, writeback: bool = True) -> Iterator[None]:
        with self._runtime.whole(writeback=writeback):
            yield

    def remove(self) -> None:
        self._runtime.remove()
        release(self._parameters)
        self._comms.close()

    # -- checkpoints ----------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        state = self._model.state_dict(keep_vars=True)
        return {name: self._shard(entry) for name, entry in state.items()}

    def _shard(self, entry: Any) -> Any:
        piece = self._pieces.get(id(entry))
        return entry if piece is None else TensorShard(piece.tensor.detach(), piece.start, piece.shape)


def _shardable(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters of a model that can be sharded; `TypeError` or `ValueError` if it cannot."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, not a {type(model).__name__}")
    named = list(model.named_parameters())
    if not named:
        raise ValueError("the model has no parameters to shard")
    for name, parameter in named:
        if torch.nn.parameter.is_lazy(parameter):
            raise ValueError(f"{name!r} is uninitialized (a lazy module). Run a forward of the model, then shard it")
        if parameter.grad is not None:
            raise ValueError(f"{name!r} has a gradient. Call model.zero_grad() before the model is sharded")
    return named
