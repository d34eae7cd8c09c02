"""Loading of a model's state into the parts of a sharded model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from unisono.checkpoint.tensor_shard import TensorShard

__all__ = ["load_entries"]

_EXTRA = "_extra_state"


def load_entries(model: nn.Module, own: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Copy a state into the shards and buffers of a model.

    Args:
        model: The module; gets the extra state of its modules.
        own: Its state with shards, whose memory is written.
        state: The state to load: shards of this rank, or whole tensors.

    Raises:
        ValueError: The states have other names, shapes or shards. Nothing is written then.
    """
    if own.keys() != state.keys():
        lacks, more = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        raise ValueError(f"the state is of another model: it lacks {lacks}, and has {more} in addition")
    found = {name: _elements(name, own[name], state[name]) for name in own}
    with torch.no_grad():
        for name, value in found.items():
            mine = own[name]
            if name.rpartition(".")[2] == _EXTRA:
                model.get_submodule(name.rpartition(".")[0]).set_extra_state(value)
            else:
                (mine.local if isinstance(mine, TensorShard) else mine).copy_(value)


def _elements(name: str, mine: Any, given: Any) -> Any:
    """Return what is to be copied into an entry; `ValueError` if it does not fit."""
    if isinstance(given, TensorShard):
        if not isinstance(mine, TensorShard) or (mine.start, len(mine.local), mine.shape) != (
            given.start,
            len(given.local),
            given.shape,
        ):
            raise ValueError(f"{name!r} is {given} in the state, and {mine} on this rank. Load it by un.checkpoint")
        return given.local
    if isinstance(mine, torch.Tensor | TensorShard):
        if not isinstance(given, torch.Tensor) or given.shape != mine.shape:
            shape = list(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
            raise ValueError(f"{name!r} is {shape} in the state, and of shape {list(mine.shape)} in the model")
        if isinstance(mine, TensorShard):
            return given.detach().reshape(-1)[mine.start : mine.start + len(mine.local)]
    return given
