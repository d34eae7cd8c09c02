"""States of a sharded model: checkpoints, and its move to other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn

from unisono.checkpoint.tensor_shard import TensorShard
from unisono.communicator import Communicator
from unisono.sharding.comms import ShardComms
from unisono.sharding.flat_parameters import FlatParameters
from unisono.sharding.runtime import Runtime
from unisono.sharding.shard_optimizer import Piece, load_entries
from unisono.utils.bucket_plan import agree_on_parameters

__all__ = ["ModelStates", "Place"]

Place = tuple[FlatParameters, int]


class ModelStates:
    """Base of `ShardedModel`: what it saves and loads, and how it follows to other ranks."""

    _model: nn.Module
    _comms: ShardComms
    _runtime: Runtime
    _settings: Sequence[object]
    # The flat tensor of each parameter, and its index there.
    _places: dict[int, Place]

    # -- checkpoints ----------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the state of the model, with this rank's part of each parameter as an `un.checkpoint.TensorShard`.

        Saved by `un.checkpoint.save` on all ranks, it is the plain model's state. The shards are the memory of the
        parts, so `un.checkpoint.load` into the state loads into the model.
        """
        state = self._model.state_dict(keep_vars=True)
        return {name: self._shard(entry) for name, entry in state.items()}

    def _shard(self, entry: Any) -> Any:
        if id(entry) not in self._places:
            return entry
        flat, index = self._places[id(entry)]
        piece = flat.pieces[index]
        return TensorShard(piece.tensor.detach(), piece.start, piece.shape)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state with shards of this rank, or with whole tensors, as a plain model has it.

        Args:
            state: A result of `state_dict` of this model, or of a plain one of the same class.

        Raises:
            ValueError: It has other names, shapes or shards. Nothing is loaded then.
            RuntimeError: A forward, a backward or `full_parameters` is running.
        """
        self._runtime.check_idle("load_state_dict()")
        load_entries(self._model, self.state_dict(), state)
        self._runtime.changed()

    # -- other ranks ----------------------------------------------------------------------------
    def move_to(self, comm: Communicator) -> None:
        """Divide the model among the ranks of another communicator. Collective over it.

        Parameters, hooks and optimizers stay the same objects. Gradients are dropped. The elements of all parts are
        NaN until a state is loaded, which `un.elastic.Recovery` does.

        Args:
            comm: The new communicator, such as the result of `comm.rebuild()`.

        Raises:
            RuntimeError: A forward, a backward or `full_parameters` is running.
            MismatchError: Ranks have different models or settings.

        Example:
            >>> def program(comm):
            ...     model = torch.nn.Linear(3, 1)
            ...     sharded = un.sharding.ShardedModel(model, comm)
            ...     state = {name: torch.ones(p.shape) for name, p in model.named_parameters()}
            ...     sharded.move_to(comm.split(comm.rank))
            ...     sharded.load_state_dict(state)
            ...     return model(torch.ones(1, 3)).item()
            >>> un.launch(program, nprocs=2, backend="thread")
            [4.0, 4.0]
        """
        self._runtime.check_idle("move_to()")
        self._comms.move_to(comm)
        # Freed parameters show no memory order.
        alike = [
            (p.name, torch.empty(p.shape, dtype=p.tensor.dtype, device="meta", requires_grad=p.tensor.requires_grad))
            for p in self._pieces.values()
        ]
        agree_on_parameters(alike, self._comms.steps, self._settings)
        self._runtime.recut()

    def snapshot(self) -> dict[str, Any]:
        """Return `state_dict()`, but with a tied parameter once. See `un.elastic.Recovery`.

        Example:
            >>> sharded = un.sharding.ShardedModel(torch.nn.Linear(3, 1), un.init("thread"))
            >>> sharded.snapshot()["weight"]
            TensorShard(0:3 of [1, 3], torch.float32)
        """
        state = self._model.state_dict(keep_vars=True)
        return {self._key(name, entry): self._shard(entry) for name, entry in state.items()}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Load a snapshot, with shards of this rank.

        Args:
            snapshot: As of `snapshot` on the present ranks.

        Example:
            >>> sharded = un.sharding.ShardedModel(torch.nn.Linear(3, 1), un.init("thread"))
            >>> sharded.restore(sharded.snapshot())
        """
        state = self._model.state_dict(keep_vars=True)
        self.load_state_dict({name: snapshot[self._key(name, entry)] for name, entry in state.items()})

    def _key(self, name: str, entry: Any) -> str:
        if id(entry) not in self._places:
            return name
        flat, index = self._places[id(entry)]
        return flat.names[index]

    @cached_property
    def _pieces(self) -> dict[str, Piece]:
        return {flat.names[index]: flat.pieces[index] for flat, index in self._places.values()}

    def shard_range(self, path: Sequence[Any]) -> tuple[int, int]:
        """Return which elements this rank has of a parameter, as start and stop in the flattened parameter.

        Args:
            path: Keys that lead to it in `snapshot()`: one name.

        Example:
            >>> sharded = un.sharding.ShardedModel(torch.nn.Linear(3, 1), un.init("thread"))
            >>> sharded.shard_range(["weight"])
            (0, 3)
        """
        piece = self._pieces[path[0]]
        return piece.start, piece.start + len(piece.tensor)
