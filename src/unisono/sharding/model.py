"""Sharded data parallelism by hooks on a plain model (ZeRO-3)."""

from __future__ import annotations

from torch import nn
import torch

from unisono.communicator import Communicator
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
    ) -> None:
        named = list(model.named_parameters())
        plans = partition(model, units)
        self._comm = comm.dup()
        self._comm.allow_any_thread()
        agree_on_parameters(named, self._comm)
        share(named, self._comm)
        self._units = make_units(plans, self._comm, param_dtype, reduce_dtype)
        self._runtime = Runtime(self._units, self._comm)
        self._runtime.hook()
