"""States of a sharded optimizer, in the layout of the unsharded one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from unisono.checkpoint.tensor_shard import TensorShard
from unisono.communicator import Communicator
from unisono.sharding.comms import NO_COPY, ShardComms
from unisono.sharding.flat_parameters import ParameterBucket
from unisono.sharding.shard_optimizer import Piece, ShardOptimizer, unwrap
from unisono.utils.bucket_plan import Named, agree_on_parameters

__all__ = ["ShardedStates"]

_MASTER, _PARAMETERS, _STEPS = "master", "parameters", "steps"


class ShardedStates(Optimizer):
    """Base of `ShardedOptimizer`: what it saves and loads."""

    _shards: ShardOptimizer
    _pieces: Sequence[Piece]
    # The bucket of each parameter, and its slot there.
    _places: Sequence[tuple[ParameterBucket, int]]
    # Indices of the parameters that were updated at least once.
    _touched: set[int]
    _buckets: Sequence[ParameterBucket]
    _comms: ShardComms
    _named: Named
    _settings: Sequence[object]
    _steps: int

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(NO_COPY)

    def _share_options(self) -> None:
        """Let the optimizer of this rank's part have the options that the caller sees."""
        for mine, theirs in zip(self.param_groups, self._shards.param_groups, strict=True):
            theirs.update({key: value for key, value in mine.items() if key != "params"})

    def _show_options(self) -> None:
        """Let the caller see the options that the optimizer of this rank's part has."""
        for mine, theirs in zip(self.param_groups, self._shards.param_groups, strict=True):
            mine.update({key: value for key, value in theirs.items() if key != "params"})

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the unsharded optimizer, in which tensors of a parameter's shape are `TensorShard`s.

        `unisono.checkpoint` saves them as whole tensors. Communicates nothing. With `master_dtype`, the state of each
        updated parameter has its master as "master".
        """
        self._share_options()
        state = self._shards.state_dict()
        for index in sorted(self._touched):
            bucket, piece = self._places[index][0], self._pieces[index]
            if bucket.has_master:
                shard = TensorShard(piece.tensor.detach(), piece.start, piece.shape)
                state["state"].setdefault(index, {})[_MASTER] = shard
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a state.

        Args:
            state_dict: A result of `state_dict` of the same rank, or a state of the unsharded optimizer with whole
                tensors. `unisono.checkpoint.load` gets one from a checkpoint of any number of ranks.

        Raises:
            ValueError: It is of other parameters, groups, or of another rank.
        """
        # A class may have states that are of no parameter, under keys of its own.
        given = state_dict["state"]
        values = {index: dict(given[index]) for index in range(len(self._pieces)) if index in given}
        masters = {index: found.pop(_MASTER) for index, found in values.items() if _MASTER in found}
        self._shards.load_state_dict({**state_dict, "state": {**given, **values}})
        self._show_options()
        self.state = self._shards.state
        self._touched = set(values)
        with torch.no_grad():
            for index, master in masters.items():
                if self._places[index][0].has_master:
                    self._pieces[index].tensor.copy_(unwrap(_MASTER, master, self._pieces[index]))

    # -- other ranks ----------------------------------------------------------------------------
    def move_to(self, comm: Communicator) -> None:
        """Divide the states among the ranks of another communicator. Collective over it.

        Parameters, hooks and the optimizer stay the same objects. Gradients are dropped. States are undefined until
        they are loaded, and parameters stay as they are on each rank; `un.elastic.Recovery` restores both.

        Args:
            comm: The new communicator, such as the result of `comm.rebuild()`.

        Raises:
            MismatchError: Ranks have different models or settings.

        Example:
            >>> def program(comm):
            ...     model = torch.nn.Linear(3, 1)
            ...     optimizer = un.sharding.ShardedOptimizer(torch.optim.SGD, model, comm, lr=0.1)
            ...     optimizer.move_to(comm.split(comm.rank))
            ...     return optimizer.shard_range(["parameters", 0])
            >>> un.launch(program, nprocs=2, backend="thread")
            [(0, 3), (0, 3)]
        """
        self._comms.move_to(comm)
        agree_on_parameters(self._named, self._comms.steps, self._settings)
        self.zero_grad()
        for bucket in self._buckets:
            bucket.recut()

    def snapshot(self) -> dict[str, Any]:
        """Return `state_dict()`, with this rank's part of the parameters. See `un.elastic.Recovery`.

        Example:
            >>> model = torch.nn.Linear(3, 1)
            >>> optimizer = un.sharding.ShardedOptimizer(torch.optim.SGD, model, un.init("thread"))
            >>> optimizer.snapshot()["parameters"]
            {0: TensorShard(0:3 of [1, 3], torch.float32), 1: TensorShard(0:1 of [1], torch.float32)}
        """
        parameters = {index: bucket.shard(slot) for index, (bucket, slot) in enumerate(self._places)}
        return {**self.state_dict(), _PARAMETERS: parameters, _STEPS: self._steps}

    @torch.no_grad()
    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Load a snapshot, and send each part of the parameters to all ranks. Collective.

        Args:
            snapshot: As of `snapshot` on the present ranks.

        Example:
            >>> model = torch.nn.Linear(3, 1)
            >>> optimizer = un.sharding.ShardedOptimizer(torch.optim.SGD, model, un.init("thread"))
            >>> optimizer.restore(optimizer.snapshot())
        """
        for index, shard in snapshot[_PARAMETERS].items():
            bucket, slot = self._places[index]
            bucket.shard(slot).local.copy_(shard.local)
            self._pieces[index].tensor.copy_(shard.local)
        self.load_state_dict({key: snapshot[key] for key in ("state", "param_groups")})
        self._steps = snapshot[_STEPS]
        for bucket in self._buckets:
            bucket.follow_parameters()
        self._gather(self._buckets)

    def _gather(self, buckets: Sequence[ParameterBucket]) -> None:
        """Send each rank's part of the parameters to all others."""
        raise NotImplementedError

    def shard_range(self, path: Sequence[Any]) -> tuple[int, int]:
        """Return which elements this rank has of a parameter, as start and stop in the flattened parameter.

        Args:
            path: Keys that lead to it, or to a state of it, in `snapshot()`.

        Example:
            >>> model = torch.nn.Linear(3, 1)
            >>> optimizer = un.sharding.ShardedOptimizer(torch.optim.SGD, model, un.init("thread"))
            >>> optimizer.shard_range(["parameters", 0])
            (0, 3)
        """
        piece = self._pieces[path[1]]
        return piece.start, piece.start + len(piece.tensor)
