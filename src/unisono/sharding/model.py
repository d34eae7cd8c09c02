"""Sharded data parallelism by hooks on a plain model (ZeRO-3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from unisono.checkpoint import TensorShard
from unisono.communicator import Communicator
from unisono.sharding.comms import ShardComms
from unisono.sharding.flat_parameters import FlatParameters
from unisono.sharding.partition import UnitPolicy, partition
from unisono.sharding.runtime import Runtime
from unisono.sharding.unit import make_units
from unisono.utils.bucket_plan import agree_on_parameters
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
        self._model = model
        named = list(model.named_parameters())
        plans = partition(model, units)
        self._comms = ShardComms(comm)
        agree_on_parameters(named, self._comms.data, [[unit.name for unit in plans], param_dtype, reduce_dtype])
        if init_sync:
            share([*named, *model.named_buffers()], self._comms.data)
        self._units = make_units(plans, self._comms, param_dtype, reduce_dtype)
        self._flats = [flat for unit in self._units for flat in unit.flats]
        self._runtime = Runtime(self._units, self._comms)
        self._runtime.hook()

    # -- training -------------------------------------------------------------------------------
    def optimizer(self, optimizer_class: type[torch.optim.Optimizer], **defaults: Any) -> torch.optim.Optimizer:
        pieces = [piece for flat in self._flats if flat.gradient is not None for _, piece in flat.pieces]
        optimizer = optimizer_class(pieces, **defaults)
        optimizer.register_step_post_hook(lambda *_: self._runtime.changed())
        return optimizer

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
        self._runtime.check_idle("full_parameters()")
        self._runtime.free()
        wholes = [flat.show_whole() for flat in self._flats]
        try:
            yield
        finally:
            for flat, whole in zip(self._flats, wholes, strict=True):
                flat.hide_whole(whole, writeback=writeback)
            self._runtime.changed()

    def remove(self) -> None:
        self._runtime.check_idle("remove()")
        self._runtime.free()
        self._runtime.unhook()
        for flat in self._flats:
            flat.restore()
        self._comms.close()

    # -- checkpoints ----------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        shards = {id(p): shard for flat in self._flats for p, shard in zip(flat.parameters, flat.shards(), strict=True)}
        state = self._model.state_dict(keep_vars=True)
        return {name: shards.get(id(entry), entry) for name, entry in state.items()}
