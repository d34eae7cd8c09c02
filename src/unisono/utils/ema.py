"""Exponential moving average of a model's parameters, optionally divided among the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from unisono.communicator import Communicator
from unisono.core.tensor_shard import TensorShard
from unisono.utils.flatten import FlatLayout
from unisono.utils.parameters import Named, agree_on_parameters, check_parameters

__all__ = ["EMA"]


class EMA:
    """Exponential moving average of a model's parameters, which are equal on all ranks.

    Gives the same values as torch's `AveragedModel` with `get_ema_multi_avg_fn`: the first update copies the
    parameters, and later updates compute `decay * average + (1 - decay) * parameter`. The average can be part of a
    checkpoint's state, which any number of ranks can load.

    Tensors are identified by name, so the model may convert or move its tensors, or replace them as
    `load_state_dict(assign=True)` does; the average keeps its dtype, device and values.

    For a `ShardedModel`, create, update and apply the average inside `with sharded.full_parameters():`.

    Args:
        model: Module whose floating-point and complex parameters are averaged. Lower-precision parameters are averaged
            in float32.
        decay: Weight of the previous average, from 0 to 1.
        comm: Communicator of the ranks, each of which keeps an equal part of the average. With `comm`, construction is
            collective. If `comm` is None, this process keeps the whole average.
        use_buffers: Whether to also average floating-point and complex buffers. Buffers that are not averaged keep the
            model's values.

    Attributes:
        n_averaged: Number of updates.

    Raises:
        MismatchError: Ranks have different models or settings. Raised on every rank.
        ValueError: `decay` is out of range, or a parameter has no elements.
        RuntimeError: A tensor of the model was removed, added or reshaped. Raised by `update` and `applied`.

    Cost: the memory of the parameters, divided by the number of ranks in `comm`. `applied` needs memory for the whole
    average on each rank.

    Method: Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", 1992.

    Example:
        >>> def program(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.constant_(model.weight, 2.0)
        ...     ema = un.utils.EMA(model, 0.75, comm)
        ...     ema.update()
        ...     torch.nn.init.constant_(model.weight, 6.0)
        ...     ema.update()
        ...     with ema.applied():
        ...         averaged = model.weight.item()
        ...     return averaged, model.weight.item()
        >>> un.launch(program, 2, "thread")
        [(3.0, 6.0), (3.0, 6.0)]
    """

    def __init__(
        self, model: torch.nn.Module, decay: float, comm: Communicator | None = None, *, use_buffers: bool = False
    ) -> None:
        self._model = model
        self._use_buffers = use_buffers
        self._average = get_ema_multi_avg_fn(decay)
        self._comm = comm
        self.n_averaged: int = 0
        self._is_applied = False
        named = [*model.named_parameters(), *(model.named_buffers() if use_buffers else ())]
        check_parameters(named)
        chosen = [(name, t) for name, t in named if t.is_floating_point() or t.is_complex()]
        if comm is not None:
            agree_on_parameters(chosen, comm, {"decay": decay, "use_buffers": use_buffers}, of="EMA", frozen=False)
        alike: dict[tuple[torch.dtype, torch.device], Named] = {}
        for name, tensor in chosen:
            kind = torch.promote_types(tensor.dtype, torch.float32), tensor.device
            alike.setdefault(kind, []).append((name, tensor))
        self._parts = [_FlatAverage(members, dtype, comm) for (dtype, _), members in alike.items()]

    @torch.no_grad()
    def update(self) -> None:
        """Add the current parameters to the average. Call this after each optimizer step, on all ranks.

        Does not communicate.

        Raises:
            RuntimeError: The average currently replaces the parameters, or the parameters are sharded and not gathered.

        Cost: one read and one write of this rank's part of the average.
        """
        self._check_not_applied("update")
        self._follow_model()
        for part in self._parts:
            if self.n_averaged == 0:
                part.copy_current()
            elif part.averages:
                self._average(part.averages, part.current(), self.n_averaged)
        self.n_averaged += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Return a context in which the average replaces the parameters; on exit, they are restored. Collective.

        Changes made to the parameters inside the context are lost.

        Raises:
            RuntimeError: The average already replaces the parameters.

        Cost: two copies of the parameters, and an all-gather of the average, which needs memory for the whole average
        on every rank.

        Example:
            >>> model = torch.nn.Linear(1, 1)
            >>> ema = un.utils.EMA(model, decay=0.99)
            >>> ema.update()
            >>> with ema.applied(), torch.no_grad():
            ...     _ = model(torch.ones(1))
        """
        self._check_not_applied("applied")
        self._follow_model()
        wholes = [part.gather() for part in self._parts]
        self._is_applied = True
        for part, whole in zip(self._parts, wholes, strict=True):
            part.swap(whole)
        try:
            yield
        finally:
            for part, whole in zip(self._parts, wholes, strict=True):
                part.swap(whole)
            self._is_applied = False

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates and the averages by name: `TensorShard`s if `comm` was given, else tensors."""
        return {
            "n_averaged": self.n_averaged,
            "average": {name: value for part in self._parts for name, value in part.state().items()},
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the average. Does not communicate.

        Args:
            state: Result of `state_dict`. An average that is a whole tensor may come from a run with any number of
                ranks.

        Raises:
            ValueError: The state belongs to a different model or different ranks; nothing is changed.
        """
        given = state["average"]
        mine = self.state_dict()["average"]
        if given.keys() != mine.keys():
            raise ValueError(f"the average is of another model: {sorted(given.keys() ^ mine.keys())[:4]}")
        pairs = [(value, _local(name, given[name], value)) for name, value in mine.items()]
        for value, local in pairs:
            (value.local if isinstance(value, TensorShard) else value).copy_(local)
        self.n_averaged = int(state["n_averaged"])

    def _follow_model(self) -> None:
        now: dict[str, torch.Tensor] = dict(self._model.named_parameters(remove_duplicate=False))
        if self._use_buffers:
            now.update(self._model.named_buffers(remove_duplicate=False))
        for part in self._parts:
            part.follow(now)
        averaged = {id(tensor) for part in self._parts for _, tensor in part.members}
        for name, tensor in now.items():
            if id(tensor) not in averaged and (tensor.is_floating_point() or tensor.is_complex()):
                raise RuntimeError(f"{name!r} has no average: it was added to the model, or untied, after that began")

    def _check_not_applied(self, call: str) -> None:
        if self._is_applied:
            raise RuntimeError(f"{call} is called inside applied(), where the parameters are the average")


def _local(name: str, given: Any, mine: Any) -> torch.Tensor:
    """Return the elements of a loaded tensor or shard that belong to this rank's shard."""
    if given.shape != mine.shape:
        raise ValueError(f"the average of {name!r} is of shape {list(given.shape)}, not {list(mine.shape)}")
    if isinstance(given, TensorShard) and isinstance(mine, TensorShard):
        if (given.start, given.stop) != (mine.start, mine.stop):
            raise ValueError(f"the average of {name!r} is {given!r}, but this rank has {mine!r}; load a checkpoint")
        return given.local
    if isinstance(given, TensorShard):
        raise ValueError(f"the average of {name!r} is {given!r}, but this process needs all of it; load a checkpoint")
    whole: torch.Tensor = given.reshape(-1)[mine.start : mine.stop] if isinstance(mine, TensorShard) else given
    return whole


class _FlatAverage:
    """This rank's part of the average of all tensors with one dtype and device."""

    def __init__(self, members: Named, dtype: torch.dtype, comm: Communicator | None) -> None:
        self.members = members
        self._shapes = [tensor.shape for _, tensor in members]
        self._comm = comm
        rank, size = (comm.rank, comm.size) if comm is not None else (0, 1)
        self._layout = FlatLayout([tensor.numel() for _, tensor in members], size)
        self._slices = self._layout.slices(rank)
        self._flat = torch.zeros(self._layout.part, dtype=dtype, device=members[0][1].device)
        self.averages = [self._flat[s.offset : s.offset + s.numel] for s in self._slices]
        self.copy_current()

    def follow(self, now: Mapping[str, torch.Tensor]) -> None:
        """Replace the averaged tensors with the tensors that now have the same names."""
        for (name, _), shape in zip(self.members, self._shapes, strict=True):
            if name not in now or now[name].shape != shape:
                found = f"of shape {list(now[name].shape)}" if name in now else "not in the model"
                raise RuntimeError(f"{name!r} was of shape {list(shape)} when its average began, and is {found}")
        self.members = [(name, now[name]) for name, _ in self.members]

    def current(self) -> list[torch.Tensor]:
        """Return the parameters' elements that belong to this part, in the dtype of the average."""
        return [
            self.members[s.index][1].detach().reshape(-1)[s.start : s.start + s.numel].to(self._flat)
            for s in self._slices
        ]

    def copy_current(self) -> None:
        for average, value in zip(self.averages, self.current(), strict=True):
            average.copy_(value)

    def gather(self) -> torch.Tensor:
        """Return the whole average in a new flat tensor. Collective."""
        whole = self._flat.new_empty(self._layout.total)
        if self._comm is None:
            return whole.copy_(self._flat)
        self._comm.all_gather_single(whole, self._flat)
        return whole

    @torch.no_grad()
    def swap(self, whole: torch.Tensor) -> None:
        """Swap the values of the averaged tensors with the values in a flat tensor."""
        tensors = [tensor for _, tensor in self.members]
        for tensor, place in zip(tensors, self._layout.views(whole, tensors), strict=True):
            before = tensor.detach().clone()
            tensor.copy_(place)
            place.copy_(before)

    def state(self) -> dict[str, torch.Tensor | TensorShard]:
        """Return this rank's part of each average by name. The parts share memory with this object."""
        found = {s.index: (average, s.start) for s, average in zip(self._slices, self.averages, strict=True)}
        nothing = self._flat[:0], 0
        shards = {
            name: TensorShard(*found.get(index, nothing), tensor.shape)
            for index, (name, tensor) in enumerate(self.members)
        }
        if self._comm is None:
            return {name: shard.local.view(shard.shape) for name, shard in shards.items()}
        return dict(shards)
