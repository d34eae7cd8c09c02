"""Fully sharded data parallelism with hooks on a plain model (ZeRO-3)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.communicator import Communicator
from unisono.core.shared_context import replaced
from unisono.sharding.comms import Mesh, NotCopied, ShardComms
from unisono.sharding.partition import UnitPolicy, partition, shardable
from unisono.sharding.runtime import Place, Runtime, make_units
from unisono.sharding.shard_optimizer import ShardOptimizer, load_entries, shard_optimizer
from unisono.utils.gradient_norms import clip_grad_norm_
from unisono.utils.parameters import INIT_SYNC, ModelMembers, agree_on_parameters, claim, release, share

__all__ = ["ShardedModel"]


class ShardedModel(NotCopied):
    """Hooks that shard the parameters, gradients and optimizer states of a plain model over all ranks (ZeRO-3).

    Each rank keeps an equal part of the parameters. The parameters of a unit, such as a transformer block, are gathered
    before the unit's forward pass and before its backward pass, and freed afterwards. Gradients are averaged, and each
    rank gets the gradients of its part. You use the model as before, and its parameters remain the same objects. A
    freed parameter keeps its shape, and raises `RuntimeError` if its elements or gradient are used.

    Construction is collective, as are all methods except `optimizer`, `no_sync`, `state_dict` and `load_state_dict`.
    All ranks must run the same forward and backward passes in the same order. Freeze parameters before you shard the
    model. `torch.compile` on the model raises `RuntimeError`.

    A parameter shared by several units, such as a tied weight, belongs to the nearest unit that encloses them all.
    Parameters outside all units belong to the model's own unit, which remains gathered between forward and backward.

    Args:
        model: Any module that has no lazy parameters and no gradients.
        comm: Communicator of the ranks that share the model, from which two dedicated communicators are derived.
        mesh: Two communicators, (replicate, shard), as in torch's `fully_shard`: parameters are divided among the ranks
            of `shard`, such as those on one host, and the ranks of `replicate` have copies of the same part. The
            `replicate` and `shard` groups of all ranks must be the columns and rows of one grid of the ranks of `comm`;
            gradients are averaged over the whole grid. If `mesh` is None, all ranks have different parts.
        units: Classes of the modules to treat as units, or a predicate on modules. If None, the units are the elements
            of each `ModuleList` and `Sequential`, such as the blocks of a transformer.
        param_dtype: Dtype in which floating-point parameters are gathered and used, as in torch's
            `MixedPrecisionPolicy`. Unlike there, inputs and buffers are not converted. The parts and the optimizer keep
            the model's dtype.
        reduce_dtype: Dtype in which gradients are averaged; by default the dtype in which they are computed.
        init_sync: Whether to broadcast rank 0's parameters and buffers now.

    Raises:
        TypeError: `model` is not a module.
        ValueError: The model has no parameters; no module is a unit; or a parameter is uninitialized, has a gradient,
            or is already averaged or sharded by another object. Raised on every rank if `mesh` is not a grid of the
            ranks of `comm`.
        MismatchError: Ranks have different models or settings. Raised by `backward()` if only some ranks have a
            gradient for a parameter. Raised by a forward or backward pass if ranks run different units, or one rank has
            skipped a backward pass.
        AbortedError: Another rank's forward or backward pass has raised. If several models share a backward pass, the
            error may have occurred before the pass reached this model. All ranks drop the gradients of the step,
            including those of earlier passes in the step; the next step is unaffected. A rank that had already finished
            its pass raises this error once, from its next forward pass, `clip_grad_norm_()` or `step()`.
        RuntimeError: Raised by a forward pass if a parameter was unfrozen, replaced, added, or modified in place.
            Raised by `backward()` if parameters were modified since the forward pass, or a gradient is sparse.

    A backward pass must enter a module through its outputs, which may be in a list, dict or dataclass. If a pass enters
    through another tensor, the parameters that it needs have been freed, and autograd raises the same error as if they
    had been modified in place. A double backward pass raises autograd's error for parameters modified in place. If a
    forward or backward pass raises, all units are freed and the gradients of the step are dropped.

    Cost: each step runs two all_gathers of the parameters and one reduce_scatter of the gradients, each with one
    message per unit and dtype; and an all_reduce of two bytes per parameter. If `comm.overlaps`, the next unit (in the
    previous step's order) is gathered while a unit runs. Memory on each of p ranks, in elements, without activations
    and transport buffers: N/p for the parts, and N/p for each optimizer state. A forward pass adds r + u; a backward
    pass adds N/p for gradients, and (2 - 1/p)(r + u) + 2w. N is the number of elements of all parameters; r, u and w
    are the element counts of the model's own unit, the largest other unit, and the largest parameter. If
    `comm.overlaps`, add u in forward and 2u in backward. Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward
    Training Trillion Parameter Models", SC 2020.

    Cost on a mesh with k ranks in `replicate` and s in `shard`: as without a mesh for p = s, plus an all_reduce of a
    part's gradients (N/s elements) over `replicate`, for which each rank sends 2 (k-1)/k N/s elements. Only gradients
    and the two bytes per parameter are sent over `replicate`. Source: Zhang et al., "MiCS: Near-linear Scaling for
    Training Gigantic Model on Public Cloud", VLDB 2022 (HSDP in torch).

    Example:
        >>> def program(comm):
        ...     model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
        ...     sharded = un.sharding.ShardedModel(model, comm)
        ...     optimizer = sharded.optimizer(torch.optim.SGD, lr=0.1)
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
        ...     with sharded.full_parameters():
        ...         return model[0].weight.shape
        >>> un.launch(program, nprocs=2, backend="thread")
        [torch.Size([4, 2]), torch.Size([4, 2])]
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        *,
        mesh: Mesh | None = None,
        units: UnitPolicy = None,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        init_sync: bool = True,
    ) -> None:
        named = shardable(model)
        plans = partition(model, units)
        self._model = model
        self._parameters = [p for _, p in named]
        self._comms = ShardComms(comm, mesh)
        self._settings = {
            "units": [unit.name for unit in plans],
            "param_dtype": param_dtype,
            "reduce_dtype": reduce_dtype,
        }
        agree_on_parameters(named, self._comms.base, self._settings, hooked=True)
        if init_sync:
            share([*named, *model.named_buffers()], self._comms.base, model=model, hint=INIT_SYNC)
        self._claim = claim(named, "sharded", "ShardedModel")
        made = make_units(plans, self._comms, param_dtype, reduce_dtype)
        flats = [flat for unit in made for flat in unit.flats]
        places = {id(p): (flat, index) for flat in flats for index, p in enumerate(flat.parameters)}
        # Keep the order of the model's parameters, as in an unsharded optimizer.
        self._places = {id(p): places[id(p)] for p in self._parameters}
        self._pieces = {key: flat.pieces[index] for key, (flat, index) in self._places.items()}
        self._named_pieces = {piece.name: piece for piece in self._pieces.values()}
        self._runtime = Runtime(made, self._comms, ModelMembers(model, named))

    # -- training -------------------------------------------------------------------------------
    def optimizer(
        self,
        optimizer_class: type[Optimizer],
        params: Iterable[torch.Tensor] | Iterable[Mapping[str, Any]] | None = None,
        *,
        elementwise: bool = False,
        **defaults: Any,
    ) -> ShardOptimizer:
        """Return an optimizer that updates this rank's part of the parameters.

        Args:
            optimizer_class: An optimizer class from torch, or a subclass of `torch.optim.Optimizer`, that updates each
                element from that element's own values only.
            params: Parameters of the model, or parameter groups, as for `optimizer_class`; all parameters if None.
            elementwise: Whether the class is known to be elementwise; if so, the trial run that checks this is skipped.
            defaults: Options for `optimizer_class`.

        Returns: An object of a class derived from `optimizer_class`. The object's `state_dict` has the unsharded
            optimizer's layout, with `un.checkpoint.TensorShard`s as values.

        Raises:
            ValueError: The class is not elementwise, or `params` contains a tensor that is not a parameter of the
                model.
            RuntimeError: Raised by `step()` if the last `backward()` ran in `no_sync`, or the caller is a `GradScaler`.
            MismatchError: Raised by `step()`, which is collective, if ranks have different options. No parameter has
                changed.
            Exception: The error of `optimizer_class`, raised by `step()`. The other ranks' next call raises an
                `AbortedError` that names the error. If the update had begun, ranks may differ, so all later calls also
                raise an error.

        Example:
            >>> def program(comm):
            ...     sharded = un.sharding.ShardedModel(torch.nn.Linear(3, 1), comm)
            ...     optimizer = sharded.optimizer(torch.optim.Adam, lr=0.1)
            ...     return sum(p.numel() for p in optimizer.param_groups[0]["params"])
            >>> un.launch(program, nprocs=2, backend="thread")
            [2, 2]
        """
        given: list[Any] = list(self._parameters if params is None else params)
        groups = given if given and isinstance(given[0], Mapping) else [{"params": given}]
        places = [[self._place(p) for p in group["params"]] for group in groups]
        cut = [
            {**group, "params": [flat.pieces[index] for flat, index in own]}
            for group, own in zip(groups, places, strict=True)
        ]
        optimizer = shard_optimizer(optimizer_class, cut, elementwise=elementwise, **defaults)
        own = [place for group in places for place in group]
        optimizer.on_zero_grad = partial(self._runtime.forget, own)
        # With this attribute, a GradScaler sets `found_inf` and always calls `step`, so that `check_step` can refuse
        # it.
        optimizer.__dict__["_step_supports_amp_scaling"] = True
        optimizer.register_step_pre_hook(partial(self._runtime.check_step, own))
        optimizer.register_step_post_hook(self._runtime.end_step)
        optimizer.on_error = self._runtime.fail_step
        return optimizer

    def _place(self, parameter: torch.Tensor) -> Place:
        if id(parameter) not in self._places:
            raise ValueError("params has a tensor that is no parameter of the sharded model")
        return self._places[id(parameter)]

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their total norm over all ranks is at most `max_norm`. Collective.

        Args:
            max_norm: Maximum norm of all gradients, taken as one vector.
            norm_type: Order of the norm; infinity for the largest absolute value.
            error_if_nonfinite: Whether to raise if the norm is infinite or NaN.

        Returns: The norm before scaling, a float64 scalar, equal on all ranks.

        Raises:
            RuntimeError: Raised on every rank if gradients are not averaged, or if `error_if_nonfinite` and the norm is
                not finite.

        Example:
            >>> def program(comm):
            ...     model = torch.nn.Linear(2, 1, bias=False)
            ...     sharded = un.sharding.ShardedModel(model, comm)
            ...     model(torch.tensor([[3.0, 4.0]])).sum().backward()
            ...     return sharded.clip_grad_norm_(1.0).item()
            >>> un.launch(program, nprocs=2, backend="thread")
            [5.0, 5.0]
        """
        self._runtime.check_reduced("clip_grad_norm_()", self._places.values())
        pieces = [piece.tensor for piece in self._pieces.values()]
        return self._comms.run(
            clip_grad_norm_, pieces, max_norm, self._comms.live.shard, norm_type, error_if_nonfinite=error_if_nonfinite
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which backward passes accumulate gradients without averaging them.

        The next pass outside the context averages the accumulated sum. Until that pass, each rank stores all gradients
        in full.

        Returns: A context manager.

        Example:
            >>> def program(comm):
            ...     model = torch.nn.Linear(1, 1, bias=False)
            ...     sharded = un.sharding.ShardedModel(model, comm)
            ...     with sharded.no_sync():
            ...         model(torch.ones(1, 1)).sum().backward()
            ...     model(torch.ones(1, 1)).sum().backward()
            ...     return sharded.clip_grad_norm_(10.0).item()
            >>> un.launch(program, nprocs=2, backend="thread")
            [2.0, 2.0]
        """
        with replaced([(self._runtime, "sync", False)]):
            yield

    # -- the whole model ------------------------------------------------------------------------
    @contextmanager
    def full_parameters(self, *, writeback: bool = True) -> Iterator[None]:
        """Gather all parameters in their original dtype, to inspect, change or save them. Collective.

        Args:
            writeback: Whether to keep changes. Each rank keeps only the changes to its own part, so make the same
                changes on all replicas.

        Returns: A context manager that frees the parameters again on exit.

        Raises:
            RuntimeError: A forward pass, a backward pass or another `full_parameters` is running. Raised on exit if a
                parameter has another shape, dtype or device than before; no change is then kept.
        """
        with self._runtime.whole(writeback=writeback):
            yield

    def abort(self, reason: str) -> None:
        """Abort current and later collectives on all ranks, for example after an error that other ranks can't see.

        Args:
            reason: Text for the other ranks' `AbortedError`.

        Example:
            >>> def program(comm):
            ...     model = torch.nn.Linear(2, 1)
            ...     sharded = un.sharding.ShardedModel(model, comm)
            ...     if comm.rank == 0:
            ...         sharded.abort("no disk space")
            ...     try:
            ...         model(torch.ones(1, 2))
            ...     except un.errors.AbortedError as error:
            ...         return "no disk space" in str(error)
            >>> un.launch(program, nprocs=2, backend="thread")
            [True, True]
        """
        self._comms.abort_all(reason)

    def remove(self) -> None:
        """Remove the hooks, and give every rank the whole, unsharded model again. Collective. Gradients are dropped.

        Raises:
            RuntimeError: A forward pass, a backward pass or `full_parameters` is running.
        """
        self._runtime.remove()
        release(self._parameters)
        self._comms.close()

    # -- checkpoints ----------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the state of the model, with this rank's part of each parameter as an `un.checkpoint.TensorShard`.

        If all ranks pass this state to `un.checkpoint.save`, the checkpoint contains a plain model's state. The shards
        share memory with the model's parts, so loading into this state with `un.checkpoint.load` also loads the model.
        """
        state = self._model.state_dict(keep_vars=True)
        return {name: self._shard(entry) for name, entry in state.items()}

    def _shard(self, entry: Any) -> Any:
        piece = self._pieces.get(id(entry))
        return entry if piece is None else piece.wrap(piece.tensor.detach())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that has this rank's shards, or whole tensors as in a plain model's state.

        Args:
            state: Result of `state_dict` of this model, or of a plain model of the same class.

        Raises:
            ValueError: The state has different names, shapes or shards. Nothing is loaded.
            RuntimeError: A forward pass, a backward pass or `full_parameters` is running.
        """
        self._runtime.check_idle("load_state_dict()")
        load_entries(self._model, self.state_dict(), state)
        self._runtime.changed()

    # -- other ranks ----------------------------------------------------------------------------
    def move_to(self, comm: Communicator, mesh: Mesh | None = None) -> None:
        """Divide the model among the ranks of another communicator. Collective over the new communicator.

        Parameters, hooks and optimizers remain the same objects. Gradients are dropped. All parts contain NaN until a
        state is loaded, for example by `un.elastic.Recovery`.

        Args:
            comm: The new communicator, such as the result of `comm.rebuild()`.
            mesh: The argument `mesh` of the class, with communicators of the new ranks.

        Raises:
            RuntimeError: A forward pass, a backward pass or `full_parameters` is running.
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
        self._comms.move_to(comm, mesh)
        # The memory format of freed parameters is unknown, so don't compare it.
        alike = [
            (p.name, torch.empty(p.shape, dtype=p.tensor.dtype, device="meta", requires_grad=p.tensor.requires_grad))
            for p in self._pieces.values()
        ]
        agree_on_parameters(alike, self._comms.base, self._settings)
        self._runtime.recut()

    def snapshot(self) -> dict[str, Any]:
        """Return `state_dict()`, with each tied parameter only once. See `un.elastic.Recovery`.

        Example:
            >>> sharded = un.sharding.ShardedModel(torch.nn.Linear(3, 1), un.init("thread"))
            >>> sharded.snapshot()["weight"]
            TensorShard(0:3 of [1, 3], torch.float32)
        """
        state = self._model.state_dict(keep_vars=True)
        return {self._key(name, entry): self._shard(entry) for name, entry in state.items()}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Load a snapshot that has this rank's shards.

        Args:
            snapshot: Snapshot with the same keys and shard ranges as the result of `snapshot` on the current ranks.

        Example:
            >>> sharded = un.sharding.ShardedModel(torch.nn.Linear(3, 1), un.init("thread"))
            >>> sharded.restore(sharded.snapshot())
        """
        state = self._model.state_dict(keep_vars=True)
        self.load_state_dict({name: snapshot[self._key(name, entry)] for name, entry in state.items()})

    def _key(self, name: str, entry: Any) -> str:
        piece = self._pieces.get(id(entry))
        return name if piece is None else piece.name

    def shard_range(self, path: Sequence[Any]) -> tuple[int, int]:
        """Return this rank's range of a parameter, as start and stop in the flattened parameter.

        Args:
            path: Path of the parameter in `snapshot()`: a sequence of one key, the parameter's name.

        Example:
            >>> sharded = un.sharding.ShardedModel(torch.nn.Linear(3, 1), un.init("thread"))
            >>> sharded.shard_range(["weight"])
            (0, 3)
        """
        piece = self._named_pieces[path[0]]
        return piece.start, piece.stop
