"""Torch optimizers on this rank's slices of parameters; in checkpoints, their states are whole tensors."""

from __future__ import annotations

import cmath
import copy
import inspect
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial, wraps
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten_with_path, tree_map

from unisono.communicator import Communicator
from unisono.core.tensor_shard import TensorShard
from unisono.core.tensors import check_apart, check_tensor
from unisono.errors import AbortedError, CommError
from unisono.sharding.comms import NotCopied
from unisono.sharding.flat_parameters import ParameterPiece
from unisono.utils.parameters import Named, check_parameters, named_tensors

__all__ = [
    "NO_OPTIONS",
    "SHARED_STATE",
    "ShardOptimizer",
    "check_elementwise",
    "check_same_step",
    "check_shardable",
    "load_entries",
    "named_groups",
    "shard_optimizer",
    "unwrap",
]

_Options = Mapping[str, Any]


SHARED_STATE = frozenset({"step", "mu_product", "eta", "mu"})
"""States that torch's optimizers keep once per parameter. Shapes do not reveal them if the parameter is 0-d."""


class ShardOptimizer(NotCopied, Optimizer):
    """Base class of optimizers that update `ParameterPiece`s; `shard_optimizer` combines it with a user's class."""

    pieces: Sequence[ParameterPiece]
    """The pieces, in group order: piece n belongs to parameter n of the unsharded optimizer."""
    ranges: Sequence[tuple[int, int]]
    """Start and length of each piece when its state was created."""
    shared: frozenset[str]
    """Names of states that do not belong to single elements of a parameter, and are equal on all ranks."""
    on_zero_grad: Callable[[], None] = staticmethod(lambda: None)
    """Function that `zero_grad` calls to drop gradients that have not reached the pieces."""
    on_error: Callable[[BaseException], None] = staticmethod(lambda error: None)
    """Function to call with the error of a failed step."""

    def check_ranges(self) -> None:
        """Raise `RuntimeError` if the pieces were re-partitioned, but the state was not."""
        if self.ranges != _ranges(self.pieces):
            raise RuntimeError(
                "the parameters of this optimizer were divided among other ranks, and its state was not. Pass the "
                "optimizer to un.elastic.Recovery, too, or load its state from a checkpoint"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise `RuntimeError` after construction, because gradients of a new group would not be averaged."""
        if "pieces" in self.__dict__:
            raise RuntimeError("a sharded optimizer takes no further groups. Create a new one with all parameters")
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free all gradients, including those that are not averaged yet."""
        super().zero_grad(set_to_none)
        self.on_zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return an unsharded optimizer's state, with `TensorShard`s in place of tensors of a parameter's shape."""
        state = super().state_dict()
        state["state"] = {
            index: {key: self._wrap(key, value, self.pieces[index]) for key, value in values.items()}
            if index in range(len(self.pieces))
            else values
            for index, values in state["state"].items()
        }
        return state

    def _wrap(self, key: str, value: Any, piece: ParameterPiece) -> Any:
        return value if key in self.shared else tree_map(partial(_wrapped, piece), value)

    def snapshot(self) -> dict[str, Any]:
        """Return `state_dict()`, which contains this rank's whole state. See `un.elastic.Recovery`."""
        return self.state_dict()

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Load a snapshot that has this rank's shards."""
        self.load_state_dict(snapshot)

    def shard_range(self, path: Sequence[Any]) -> tuple[int, int]:
        """Return this rank's range of the tensor at a path in `snapshot()`, as start and stop."""
        piece = self.pieces[path[1]]
        return piece.start, piece.stop

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a state that has this rank's shards, or whole tensors as in an unsharded optimizer's state.

        Raises:
            ValueError: The state belongs to different parameters, groups or shards.
        """
        if [len(group["params"]) for group in state_dict["param_groups"]] == [
            len(group["params"]) for group in self.param_groups
        ]:
            numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
            pieces = dict(zip(numbers, self.pieces, strict=True))
            state = {
                index: {key: self._unwrap(key, value, pieces[index]) for key, value in values.items()}
                if index in pieces
                else copy.deepcopy(values)
                for index, values in state_dict["state"].items()
            }
            state_dict = {**state_dict, "state": state}
        super().load_state_dict(state_dict)
        self.ranges = _ranges(self.pieces)

    def _unwrap(self, key: str, value: Any, piece: ParameterPiece) -> Any:
        return copy.deepcopy(value) if key in self.shared else tree_map(lambda leaf: unwrap(key, leaf, piece), value)


def _wrapped(piece: ParameterPiece, leaf: Any) -> Any:
    """Return a leaf of a parameter's state: a shard if it has the shape of this rank's piece, or else the leaf."""
    return piece.wrap(leaf) if isinstance(leaf, torch.Tensor) and leaf.shape == piece.tensor.shape else leaf


def shard_optimizer(
    optimizer_class: type[Optimizer], groups: Sequence[_Options], *, elementwise: bool = False, **defaults: Any
) -> ShardOptimizer:
    """Return an optimizer of the user's class on this rank's pieces of parameters. Does not communicate.

    Args:
        optimizer_class: An optimizer class from torch, or a subclass of `torch.optim.Optimizer`.
        groups: Parameter groups, as for `optimizer_class`, but with `ParameterPiece`s as "params".
        elementwise: Whether the class is known to be elementwise; if so, the trial run that checks this is skipped.
        defaults: Options for `optimizer_class`.

    Raises:
        ValueError: The class is not elementwise; see `check_elementwise`.

    Example:
        >>> from unisono.sharding.flat_parameters import ParameterPiece
        >>> from unisono.sharding.shard_optimizer import shard_optimizer
        >>> half = torch.nn.Parameter(torch.ones(2))
        >>> piece = ParameterPiece("w", torch.Size([2, 2]), 2, half)
        >>> optimizer = shard_optimizer(torch.optim.Adam, [{"params": [piece]}])
        >>> half.grad = torch.ones(2)
        >>> optimizer.step()
        >>> optimizer.state_dict()["state"][0]["exp_avg"]
        TensorShard(2:4 of [2, 2], torch.float32)
    """
    shared = SHARED_STATE if elementwise else check_elementwise(optimizer_class, groups, defaults)
    return _make(optimizer_class, groups, defaults, shared)


def _make(
    optimizer_class: type[Optimizer], groups: Sequence[_Options], defaults: _Options, shared: frozenset[str]
) -> ShardOptimizer:
    pieces = [piece for group in groups for piece in group["params"]]
    made: Any = type(f"Sharded{optimizer_class.__name__}", (ShardOptimizer, optimizer_class), {})
    optimizer: ShardOptimizer = made(
        [{**group, "params": [piece.tensor for piece in group["params"]]} for group in groups], **defaults
    )
    optimizer.pieces = pieces
    optimizer.ranges = _ranges(pieces)
    optimizer.shared = shared
    optimizer.register_step_pre_hook(lambda stepping, *_: stepping.check_ranges())
    # Torch's own wrapper of `step` calls the step hooks. Wrap it in turn, so that errors in the hooks are also
    # reported.
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


def _ranges(pieces: Sequence[ParameterPiece]) -> list[tuple[int, int]]:
    return [(piece.start, len(piece.tensor)) for piece in pieces]


def check_elementwise(
    optimizer_class: type[Optimizer], groups: Sequence[_Options], defaults: _Options
) -> frozenset[str]:
    """Check by trial that slices of parameters are updated like whole parameters; see `_Trial`.

    The check takes about 50 ms.

    A failed trial is repeated with no gradient missing, and then with a single group, for classes that support only
    these cases. The trial has no side effects: it draws no random numbers from torch, compiles nothing, and copies the
    options.

    Args:
        optimizer_class: The class to try.
        groups: Parameter groups with `ParameterPiece`s as "params". The trial uses the groups' options, and the
            pieces' dtypes, devices and numbers of dimensions.
        defaults: Options for `optimizer_class`.

    Returns: Names of states that do not belong to single elements of a parameter, and are equal on all ranks.

    Raises:
        ValueError: Updates, states or options of slices differ from those of whole parameters, some state is not in
            `state_dict()`, random numbers are drawn, or the trial fails.
    """
    name = optimizer_class.__name__
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            f"{name}.step() needs a closure, to compute several gradients in a step. The step of a sharded optimizer "
            "has one averaged gradient, so this class cannot be sharded"
        )
    advice = "If each element's update depends on its own values only, pass elementwise=True"
    failed: Exception | None = None
    for missing, at_least in ((True, 2), (False, 2), (False, 1)):
        try:
            # Hold the compile lock, because `set_stance` affects all threads. Torch's optimizers also read a flag that
            # all threads share, which tells whether anything is being compiled.
            with torch._dynamo.convert_frame.compile_lock, torch.compiler.set_stance("force_eager"):
                return _Trial(optimizer_class, groups, defaults, missing, at_least).run()
        except _RefusedError as refused:
            raise ValueError(f"{name} {refused}, so its states cannot be sharded. {advice}") from None
        except Exception as error:
            # Catch everything, because the user's class may raise any exception.
            failed = error
    raise ValueError(f"{name} failed in a trial step: {failed}. {advice}") from failed


class _RefusedError(Exception):
    """Reason why a class cannot be sharded."""


class _NoRandomNumbers(TorchFunctionMode):
    """Context that rejects random numbers, because slices would get different numbers than whole parameters."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, but raise `_RefusedError` if it draws random numbers."""
        if _draws(func):
            raise _RefusedError(f"draws random numbers, by {func.__name__}()")
        return func(*args, **(kwargs or {}))


@cache
def _draws(func: Callable[..., Any]) -> bool:
    op: Any = getattr(torch.ops.aten, getattr(func, "__name__", ""), None)
    overloads = op.overloads() if hasattr(op, "overloads") else []
    return any(torch.Tag.nondeterministic_seeded in getattr(op, overload).tags for overload in overloads)


_Run = tuple[Optimizer, Sequence[torch.Tensor]]
"""An optimizer of a trial, and its parameters."""


class _Trial:
    """Trial that takes the same steps with one optimizer on whole parameters and three ranks' optimizers on slices.

    Rank 0 has three quarters of each parameter, rank 1 the last quarter, and rank 2 empty slices. Each distinct
    group in `groups` has a counterpart in the trial. For each dtype and device in the original group, the counterpart
    has one parameter of 160 x 160 elements, which is above optimizers' size thresholds, and several small parameters:
    one with 2 dimensions, and one for each other number of dimensions in the original group. Gradient norms range from
    1e-3 to 1e3. After 12 steps, all states are loaded into new optimizers, which take 3 more steps.

    Args:
        optimizer_class, groups, defaults: As for `check_elementwise`.
        missing: Whether some gradients are missing.
        at_least: Minimum number of groups, reached by repeating the last group with only its first parameter.
    """

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        groups: Sequence[_Options],
        defaults: _Options,
        missing: bool,
        at_least: int,
    ) -> None:
        self._class = optimizer_class
        self._defaults = defaults
        self._missing = missing
        generator = torch.Generator().manual_seed(0)
        self._noise = torch.randn(2**15, dtype=torch.float64, generator=generator, device="cpu")
        # The trial's parameter groups, with the initial values of the whole parameters.
        self._groups: list[_Options] = []
        known = set()
        for group in groups:
            tensors = [piece.tensor for piece in group["params"]]
            kinds = {(t.dtype, t.device) for t in tensors if t.dtype.is_floating_point or t.dtype.is_complex}
            ndims = {2, *(len(piece.shape) for piece in group["params"])}
            options = {key: bool(value) if isinstance(value, float) else value for key, value in group.items()}
            card = repr({**options, "params": (kinds, ndims)})
            if kinds and card not in known:
                known.add(card)
                shapes = [*(range(2, 2 + n) for n in ndims), (160, 160)]
                self._groups.append({**group, "params": [self._draw(0, s, *kind) for kind in kinds for s in shapes]})
        while self._groups and len(self._groups) < at_least:
            self._groups.append({**self._groups[-1], "params": self._groups[-1]["params"][:1]})

    def _draw(
        self, number: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device, slope: float = 0.9
    ) -> torch.Tensor:
        """Return random elements scaled by a linear ramp, so that a slice and its parameter differ in norm and mean."""
        count = math.prod(shape)
        drawn = self._noise[number * 7 % 7000 :][:count] * torch.linspace(
            1 - slope, 1 + slope, count, dtype=torch.float64, device="cpu"
        )
        return drawn.view(tuple(shape)).to(device, dtype)

    def run(self) -> frozenset[str]:
        """Raise `_RefusedError` unless slices are updated like whole parameters; return the names of shared states."""
        whole, *ranks = self._start()
        for optimizer, _ in (whole, *ranks):
            for number, group in enumerate(optimizer.param_groups):
                if "lr" in group:
                    # Make updates large enough that rounding does not hide differences.
                    group["lr"] = group["lr"] * 0 + 0.1 / (1 + number)
        for step in range(12):
            self._step(step, whole, ranks)
        shared = _compare(whole, ranks)
        values = iter(whole[1])
        self._groups = [{**g, "params": [next(values).detach() for _ in g["params"]]} for g in self._groups]
        resumed = self._start()
        for optimizer, _ in resumed:
            if isinstance(optimizer, ShardOptimizer):
                optimizer.shared = shared
            optimizer.load_state_dict(copy.deepcopy(whole[0].state_dict()))
        _check_kept(whole[0], resumed[0][0])
        for step in range(12, 15):
            self._step(step, resumed[0], resumed[1:])
        _compare(resumed[0], resumed[1:])
        return shared

    def _start(self) -> list[_Run]:
        """Return a new optimizer on whole parameters, and a new optimizer for each rank's slices."""
        runs: list[_Run] = []
        for rank in (None, 0, 1, 2):
            groups = []
            for group in self._groups:
                options = copy.deepcopy({key: value for key, value in group.items() if key != "params"})
                pieces = [
                    ParameterPiece(
                        "a parameter", value.shape, _border(value, rank or 0), torch.nn.Parameter(_slice(value, rank))
                    )
                    for value in group["params"]
                ]
                groups.append({**options, "params": pieces})
            tensors = [piece.tensor for group in groups for piece in group["params"]]
            defaults = copy.deepcopy(self._defaults)
            with _NoRandomNumbers():
                if rank is None:
                    plain = [{**group, "params": [piece.tensor for piece in group["params"]]} for group in groups]
                    runs.append((self._class(plain, **defaults), tensors))
                else:
                    runs.append((_make(self._class, groups, defaults, frozenset()), tensors))
        return runs

    def _step(self, step: int, whole: _Run, ranks: Sequence[_Run]) -> None:
        """Take one step with new gradients on all optimizers, and compare the parameters."""
        for index, value in enumerate(whole[1]):
            gradient = self._draw(1 + 16 * index + step, value.shape, value.dtype, value.device, -0.9)
            # Long vectors get no gradient in the first steps, so that a class that builds matrices of that size is
            # refused before it builds one.
            early = step < 2 and value.numel() > 10_000
            missing = self._missing and ((step + index) % 4 == 0 or early)
            gradient *= 10 ** ((5 * step + 3 * index) % 12 * 6 / 11 - 3) / torch.linalg.vector_norm(gradient)
            for rank, (_, tensors) in enumerate((whole, *ranks), -1):
                tensors[index].grad = None if missing else _slice(gradient, None if rank < 0 else rank)
        for rank, (optimizer, tensors) in enumerate((whole, *ranks), -1):
            try:
                with _NoRandomNumbers():
                    optimizer.step()
            except Exception as error:
                if rank < 0 or isinstance(error, _RefusedError):
                    raise
                raise _RefusedError(f"fails on a slice of a parameter ({error})") from error
            for value, tensor in zip(whole[1], tensors, strict=True):
                if not _same(_slice(value.detach(), None if rank < 0 else rank), tensor.detach()):
                    raise _RefusedError("updates a slice of a parameter differently from the whole parameter")


def _border(value: torch.Tensor, rank: int) -> int:
    return [0, value.numel() * 3 // 4 | 1, value.numel(), value.numel()][rank]


def _slice(value: torch.Tensor, rank: int | None) -> torch.Tensor:
    return value.clone() if rank is None else value.reshape(-1)[_border(value, rank) : _border(value, rank + 1)].clone()


def _compare(whole: _Run, ranks: Sequence[_Run]) -> frozenset[str]:
    """Return the names of shared states.

    Raises `_RefusedError` unless slices have the same states and options as whole parameters.
    """
    trees = [dict(_leaves(optimizer.state_dict())) for optimizer, _ in (whole, *ranks)]
    shared = set[str]()
    elements = set[str]()
    for path in {path: None for tree in trees for path in tree}:
        value: Any = trees[0].get(path)
        parts: list[Any] = [tree.get(path) for tree in trees[1:]]
        # Check rank 2, whose slices are empty in this trial, so that a shared state with one element can't be mistaken
        # for a slice.
        is_shared = not isinstance(parts[-1], TensorShard)
        local: list[Any] = [part.local if isinstance(part, TensorShard) else part for part in parts]
        if path[0] == "state" and len(path) > 2:
            (shared if is_shared else elements).add(path[2])
        if not is_shared and isinstance(value, torch.Tensor) and value.shape == parts[-1].shape:
            value = value.reshape(-1)
            local = [torch.cat(local)]
        if not all(_same(value, part) for part in local):
            where = "".join(f"[{key!r}]" for key in path)
            raise _RefusedError(f"keeps another state_dict(){where} for slices than for whole parameters")
    return frozenset(shared - elements)


def _leaves(tree: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Return the leaves of a tree, each with the keys that lead to it."""
    for path, leaf in tree_flatten_with_path(tree)[0]:
        yield tuple(getattr(key, "key", getattr(key, "idx", key)) for key in path), leaf


def _check_kept(optimizer: Optimizer, resumed: Optimizer) -> None:
    """Raise `_RefusedError` if an optimizer has numbers or tensors that are lost when its state is loaded."""
    after = dict(_leaves({**vars(resumed), "state": 0, "param_groups": 0}))
    for path, value in _leaves({**vars(optimizer), "state": 0, "param_groups": 0}):
        if not _same(value, after.get(path)):
            raise _RefusedError(f"changes its attribute {path[0]!r} in step(), which is not in its state_dict()")


def _same(value: Any, other: Any) -> bool:
    """Return whether two tensors or numbers are equal up to rounding, or two other values have the same type."""
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        if value.shape != other.shape or value.dtype != other.dtype:
            return False
        if not (value.dtype.is_floating_point or value.dtype.is_complex):
            return torch.equal(value, other)
        if torch.equal(value, other):
            return True
        rtol = max(1e-5, 4 * torch.finfo(value.dtype).eps)
        return torch.allclose(value, other, rtol=rtol, atol=rtol * float(value.abs().max() if value.numel() else 0))
    if isinstance(value, bool | str) or not isinstance(value, int | float | complex):
        return type(value) is type(other)
    return isinstance(other, int | float | complex) and (value == other or cmath.isclose(value, other, rel_tol=1e-5))


def unwrap(key: str, value: Any, piece: ParameterPiece) -> Any:
    """Return this rank's elements of a parameter's saved value; a scalar or other object is returned whole.

    Raises:
        ValueError: The value has an incompatible shape, or is another rank's shard.
    """
    if isinstance(value, TensorShard):
        if (value.start, value.stop, value.shape) != (piece.start, piece.stop, piece.shape):
            raise ValueError(
                f"the state's {key!r} of {piece.name!r} is {value}, not this rank's shard, from {piece.start} to "
                f"{piece.stop} of {list(piece.shape)}. Load states through un.checkpoint, "
                "or whole ones"
            )
        return value.local
    if not isinstance(value, torch.Tensor):
        return value
    if value.ndim == 0 and (piece.shape or key in SHARED_STATE):
        return value.clone()
    if value.shape != piece.shape:
        raise ValueError(
            f"the state's {key!r} of {piece.name!r} has shape {list(value.shape)}, not {list(piece.shape)}"
        )
    return piece.cut(value).clone()


def named_groups(model: torch.nn.Module | Iterable[Any]) -> list[dict[str, Any]]:
    """Return groups whose "params" are pairs of name and parameter.

    Args:
        model: A module, parameters, pairs of name and parameter, or groups of parameters or pairs.

    Raises:
        TypeError: `model`, or an element of it, has an unsupported type.
        ValueError: `model` is empty, or contains a parameter twice.

    Example:
        >>> from unisono.sharding.shard_optimizer import named_groups
        >>> [[name for name, _ in group["params"]] for group in named_groups(torch.nn.Linear(2, 1))]
        [['weight', 'bias']]
    """
    if isinstance(model, torch.nn.Module | torch.Tensor):
        groups: list[dict[str, Any]] = [{"params": named_tensors(model)}]
    else:
        given = list(model)
        grouped = bool(given) and isinstance(given[0], Mapping)
        groups = [dict(group) for group in given] if grouped else [{"params": given}]
        for number, group in enumerate(groups):
            listed = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
            where = f"group {number}, " if grouped else ""
            group["params"] = [_named(entry, f"{where}parameter {i}") for i, entry in enumerate(listed)]
    seen: set[int] = set()
    for name, parameter in (pair for group in groups for pair in group["params"]):
        if id(parameter) in seen:
            raise ValueError(f"{name!r} is among the parameters twice")
        seen.add(id(parameter))
    if not seen:
        raise ValueError("model has no parameters")
    return groups


def _named(entry: Any, place: str) -> tuple[str, torch.Tensor]:
    name, parameter = entry if isinstance(entry, tuple) else (place, entry)
    if not isinstance(parameter, torch.Tensor):
        raise TypeError(f"{name} is a {type(parameter).__name__}, not a tensor")
    return name, parameter


def check_shardable(named: Named, master_dtype: torch.dtype | None) -> None:
    """Raise unless each parameter can become a view of a flat tensor.

    Raises:
        ValueError: A parameter (named in the error) is uninitialized, not a leaf, sparse, shares memory with another
            parameter, or has a dtype that `master_dtype` cannot represent.
        TypeError: `master_dtype` is not a floating-point dtype.
    """
    if master_dtype is not None and not master_dtype.is_floating_point:
        raise TypeError(f"master_dtype must be a floating-point dtype, not {master_dtype}")
    check_parameters(named)
    for name, parameter in named:
        check_tensor(parameter, repr(name), frozenset([parameter.device.type]), written=True)
        if master_dtype is not None and parameter.is_complex():
            raise ValueError(f"{name!r} is {parameter.dtype}, for which there is no master_dtype")
    check_apart([(repr(name), parameter) for name, parameter in named])


_EXTRA = "_extra_state"


def load_entries(model: nn.Module, own: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Copy a state into the shards and buffers of a model.

    Args:
        model: The module, whose submodules' extra state is loaded as well.
        own: The module's state with shards; values are copied into its tensors.
        state: The state to load: shards of this rank, or whole tensors.

    Raises:
        ValueError: The states have different names, shapes or shards. Nothing is written.
    """
    if own.keys() != state.keys():
        lacks = sorted(own.keys() - state.keys())
        more = sorted(state.keys() - own.keys())
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
    """Return the elements to copy into an entry; raise `ValueError` if they do not fit."""
    if isinstance(given, TensorShard):
        if not isinstance(mine, TensorShard) or (mine.start, mine.stop, mine.shape) != (
            given.start,
            given.stop,
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


_ADVICE = (
    "average them before step(), by un.GradientAverager(model, comm), un.average_gradients(model, comm) or "
    "shard_gradients=True"
)


def check_same_step(
    names: Sequence[str],
    present: Sequence[bool],
    groups: Sequence[Mapping[str, Any]],
    gradients: Sequence[torch.Tensor],
    step: int,
    comm: Communicator,
    problem: Exception | None = None,
) -> None:
    """Raise on every rank if any rank has a problem, or if gradients or options differ between ranks. Collective.

    Cost: one all_gather of 8 bytes, and 3 us per gradient to compare one of its elements; each step compares a
    different element.

    Args:
        names: Names of all parameters.
        present: For each parameter, whether it has a gradient.
        groups: Groups of the optimizer.
        gradients: Gradients, in order, that should be identical on all ranks; empty if they differ by design.
        step: Number of the step.
        comm: Communicator of the ranks that take the step.
        problem: Error that this rank is to raise, or None; the other ranks raise an `AbortedError` that names the
            error.
    """
    try:
        if comm.size > 1:
            card = (None if problem is None else f"{type(problem).__name__}: {problem}", list(present))
            _compare_step(names, (*card, [_numbers(group) for group in groups], _samples(gradients, step)), comm)
    except CommError:
        if problem is None:
            raise
    if problem is not None:
        raise problem


_Card = tuple[str | None, list[bool], list[list[tuple[str, str]]], list[str]]
"""What ranks compare before a step: error text, which parameters have a gradient, options, and samples of gradients."""


def _compare_step(names: Sequence[str], card: _Card, comm: Communicator) -> None:
    found = torch.empty(comm.size, dtype=torch.int64, device=comm.device)
    comm.all_gather_single(found, torch.tensor([zlib.crc32(repr(card).encode())], device=comm.device))
    if len(set(found.tolist())) == 1:
        return
    cards = comm.all_gather_object(card)
    for rank, (problem, *_) in enumerate(cards):
        if problem is not None:
            raise AbortedError(
                f"rank {rank} failed in optimizer.step(), so no rank makes that step: {problem}",
                rank=comm.rank,
                size=comm.size,
                peer=rank,
            )
    _, present, options, samples = card
    comm.agree(dict(zip(names, present, strict=True)), "which parameters have a gradient")
    comm.agree(list(map(dict, options)), "options of the groups")
    comm.agree(samples, f"gradients ({_ADVICE})")
    comm.flush_agreements()


NO_OPTIONS = frozenset({"params", "capturable"})
"""Entries of a group that are neither compared nor copied from the caller's groups.

Dynamo sets "capturable" when it compiles a function that writes an option, perhaps at different times on different
ranks.
"""


def _numbers(group: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the numeric options of a group as text."""
    plain = {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in sorted(group.items())}
    return [
        (key, repr(value))
        for key, value in plain.items()
        if key not in NO_OPTIONS and isinstance(value, int | float | tuple | list)
    ]


def _samples(gradients: Sequence[torch.Tensor], step: int) -> list[str]:
    """Return one element of each gradient as text, with all its digits."""
    by_dtype: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for grad in gradients:
        if grad.numel():
            element = grad[tuple(step * 7919 // (i + 1) % n for i, n in enumerate(grad.shape))]
            by_dtype.setdefault((grad.dtype, grad.device), []).append(element)
    return [repr(value) for elements in by_dtype.values() for value in torch.stack(elements).tolist()]
