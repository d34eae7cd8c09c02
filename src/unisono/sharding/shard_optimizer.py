"""Optimizers of torch on this rank's slices of parameters, with states that checkpoints see as whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from unisono.checkpoint.tensor_shard import TensorShard
from unisono.sharding.comms import NO_COPY

__all__ = ["Piece", "ShardOptimizer", "check_elementwise", "shard_optimizer", "unwrap"]

_Options = Mapping[str, Any]


_SCALARS = {"step", "mu_product", "eta", "mu"}
"""States of torch's optimizers that are one number for a parameter: those of a 0-d parameter have the same shape."""


@dataclass(slots=True)
class Piece:
    """Slice of one parameter that this rank updates. Each rank has one of each parameter, which may be empty.

    Attributes:
        name: Name of the parameter.
        shape: Shape of the whole parameter.
        start: Index of the first element in the flattened parameter.
        tensor: 1-d parameter that the optimizer updates. Its `.grad` is set before the step.
    """

    name: str
    shape: torch.Size
    start: int
    tensor: torch.nn.Parameter

    def move(self, start: int, elements: torch.Tensor) -> None:
        """Become another slice, for another number of ranks. The tensor stays the same object.

        Args:
            start: As `start`.
            elements: Memory of the slice.
        """
        self.start, self.tensor.grad, self.tensor.data = start, None, elements

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this piece's elements of a tensor of the parameter's shape: a view where its memory allows."""
        return whole.reshape(-1)[self.start : self.start + len(self.tensor)]


class ShardOptimizer(Optimizer):
    """Base of the classes that `shard_optimizer` makes: its parameters are pieces, the rest is the user's class."""

    pieces: Sequence[Piece]
    """The pieces, in the order of the groups: the n-th one is of the unsharded optimizer's parameter n."""
    ranges: Sequence[tuple[int, int]]
    """Start and length of each piece that the state is of."""
    on_zero_grad: Sequence[Callable[[], None]] = ()
    """Called by `zero_grad`: they drop gradients that are not those of the pieces yet."""

    on_error: Callable[[BaseException], None] = staticmethod(lambda error: None)
    """Called with the error of a step that has raised."""

    def check_ranges(self) -> None:
        """`RuntimeError` if the pieces have become those of other ranks, and the state has not."""
        if self.ranges != _ranges(self.pieces):
            raise RuntimeError(
                "the parameters of this optimizer were divided among other ranks, and its state was not. Pass the "
                "optimizer to un.elastic.Recovery, too, or load its state from a checkpoint"
            )

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(NO_COPY)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise `RuntimeError` once the optimizer is created: gradients of a further group would not be averaged."""
        if "pieces" in self.__dict__:
            raise RuntimeError("a sharded optimizer takes no further groups. Create a new one with all parameters")
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free all gradients, those of passes that are not averaged too."""
        super().zero_grad(set_to_none)
        for drop in self.on_zero_grad:
            drop()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as the unsharded optimizer has it, each tensor of a parameter's shape as a `TensorShard`."""
        state = super().state_dict()
        state["state"] = {
            index: {key: _wrap(value, self.pieces[index]) for key, value in values.items()}
            for index, values in state["state"].items()
        }
        return state

    def snapshot(self) -> dict[str, Any]:
        """Return `state_dict()`: all that this rank holds. See `un.elastic.Recovery`."""
        return self.state_dict()

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Load a snapshot, with shards of this rank."""
        self.load_state_dict(snapshot)

    def shard_range(self, path: Sequence[Any]) -> tuple[int, int]:
        """Return which elements this rank has of the tensor that is at a path in `snapshot()`, as start and stop."""
        piece = self.pieces[path[1]]
        return piece.start, piece.start + len(piece.tensor)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a state with shards of this rank, or with whole tensors, as an unsharded optimizer has it.

        Raises:
            ValueError: It is of other parameters, groups, or shards.
        """
        if [len(group["params"]) for group in state_dict["param_groups"]] == [
            len(group["params"]) for group in self.param_groups
        ]:
            numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
            pieces = dict(zip(numbers, self.pieces, strict=True))
            state = {
                index: {key: unwrap(key, value, pieces[index]) for key, value in values.items()}
                for index, values in state_dict["state"].items()
            }
            state_dict = {**state_dict, "state": state}
        super().load_state_dict(state_dict)
        self.ranges = _ranges(self.pieces)


def shard_optimizer(
    optimizer_class: type[Optimizer], groups: Sequence[_Options], *, elementwise: bool = False, **defaults: Any
) -> ShardOptimizer:
    """Return an optimizer of the user's class on this rank's pieces of parameters. Communicates nothing.

    Args:
        optimizer_class: A class of torch's, or one that is derived from `torch.optim.Optimizer`.
        groups: Groups as for the class, with `Piece`s as "params".
        elementwise: Whether the class is known to be elementwise, so that it is not tried.
        defaults: Options for the class.

    Raises:
        ValueError: The class is not elementwise; see `check_elementwise`.

    Example:
        >>> from unisono.sharding.shard_optimizer import Piece, shard_optimizer
        >>> half = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = shard_optimizer(torch.optim.Adam, [{"params": [Piece("w", torch.Size([2, 2]), 2, half)]}])
        >>> half.grad = torch.ones(2)
        >>> optimizer.step()
        >>> optimizer.state_dict()["state"][0]["exp_avg"]
        TensorShard(2:4 of [2, 2], torch.float32)
    """
    pieces = [piece for group in groups for piece in group["params"]]
    if not elementwise:
        device = pieces[0].tensor.device if pieces else torch.device("cpu")
        for group in groups:
            check_elementwise(optimizer_class, {k: v for k, v in group.items() if k != "params"}, defaults, device)
    made: Any = type(f"Sharded{optimizer_class.__name__}", (ShardOptimizer, optimizer_class), {})
    optimizer: ShardOptimizer = made(
        [{**group, "params": [piece.tensor for piece in group["params"]]} for group in groups], **defaults
    )
    optimizer.pieces, optimizer.ranges = pieces, _ranges(pieces)
    optimizer.register_step_pre_hook(lambda *_: optimizer.check_ranges())
    # Torch has wrapped the method of the new class, and calls the hooks of a step inside.
    made.step = _reporting(made.step)
    return optimizer


def _reporting(step: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(step)
    def reporting(self: ShardOptimizer, *args: Any, **kwargs: Any) -> Any:
        try:
            return step(self, *args, **kwargs)
        except BaseException as error:
            self.on_error(error)
            raise

    return reporting


def _ranges(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    return [(piece.start, len(piece.tensor)) for piece in pieces]


def check_elementwise(
    optimizer_class: type[Optimizer], options: _Options, defaults: _Options, device: torch.device
) -> None:
    """Try whether a class updates each element by itself: on a small matrix, whole and in two flat slices.

    Args:
        optimizer_class: The class to try.
        options: Options of a group.
        defaults: Options for the class.
        device: Device of the trial.

    Raises:
        ValueError: The updates differ, or the trial fails.
    """
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randn(2, 3, generator=generator).to(device) * scale for scale in (1, 1, 100, 0.01)]
    start = draws[0]
    whole, *parts = (torch.nn.Parameter(t.clone()) for t in (start, *start.reshape(-1).split([4, 2])))
    advice = "If each element's update depends on its own values only, pass elementwise=True"
    try:
        tried = [optimizer_class([{**options, "params": params}], **defaults) for params in ([whole], parts)]
        for gradient in draws[1:]:
            whole.grad = gradient
            for part, piece in zip(parts, gradient.reshape(-1).split([4, 2]), strict=True):
                part.grad = piece.clone()
            for optimizer in tried:
                for group in optimizer.param_groups:
                    group.update({"lr": 0.1} if "lr" in group else {})
                optimizer.step()
    except Exception as error:
        raise ValueError(
            f"{optimizer_class.__name__} failed in a trial step on slices of a parameter: {error}. {advice}"
        ) from error
    if not torch.allclose(whole.reshape(-1), torch.cat([*parts]), rtol=1e-5, atol=1e-6):
        raise ValueError(
            f"{optimizer_class.__name__} updates a slice of a parameter otherwise than the whole parameter, so its "
            f"states cannot be sharded. {advice}"
        )


def _wrap(value: Any, piece: Piece) -> Any:
    shaped = isinstance(value, torch.Tensor) and value.shape == piece.tensor.shape
    return TensorShard(value, piece.start, piece.shape) if shaped else value


def unwrap(key: str, value: Any, piece: Piece) -> Any:
    """Return this rank's elements of a saved value of a parameter; the value itself if it is none of its shape.

    Raises:
        ValueError: It has another shape, or is the shard of another rank.
    """
    if isinstance(value, TensorShard):
        if (value.start, len(value.local), value.shape) != (piece.start, len(piece.tensor), piece.shape):
            raise ValueError(
                f"the state's {key!r} of {piece.name!r} is {value}, not this rank's shard, from {piece.start} to "
                f"{piece.start + len(piece.tensor)} of {list(piece.shape)}. Load states through un.checkpoint, "
                "or whole ones"
            )
        return value.local
    if not isinstance(value, torch.Tensor):
        return value
    if value.ndim == 0 and (piece.shape or key in _SCALARS):
        return value.clone()
    if value.shape != piece.shape:
        raise ValueError(
            f"the state's {key!r} of {piece.name!r} has shape {list(value.shape)}, not {list(piece.shape)}"
        )
    return piece.cut(value).clone()
