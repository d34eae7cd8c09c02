"""Optimizers whose states, and optionally gradients, are divided among the ranks (ZeRO-1 and ZeRO-2)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from unisono.communicator import Communicator
from unisono.core.garbage import weak_method
from unisono.core.shared_context import replaced
from unisono.errors import ClosedError, CommError, PeerLostError
from unisono.sharding.comms import Mesh, NotCopied, ShardComms
from unisono.sharding.flat_parameters import FlatGradient, ParameterBucket, ParameterPiece, ShardedGradient
from unisono.sharding.shard_optimizer import (
    NO_OPTIONS,
    check_same_step,
    check_shardable,
    named_groups,
    shard_optimizer,
    unwrap,
)
from unisono.utils.backward_pass import BackwardTracker, PassOwner
from unisono.utils.flatten import in_bytes, plan_buckets
from unisono.utils.gradient_norms import clip_grad_norm_
from unisono.utils.parameters import (
    INIT_SYNC,
    ModelMembers,
    agree_on_parameters,
    check_unclaimed,
    claim,
    release,
    share,
    warn_of_norm_limits,
)
from unisono.utils.pass_watch import PassWatch

__all__ = ["GradientSharder", "ShardedOptimizer"]


class ShardedOptimizer(NotCopied, Optimizer):
    """A torch optimizer whose states (and, with `shard_gradients`, gradients) are divided among the ranks.

    Each rank updates its part of every parameter, and receives the other parts. The parameters remain the same objects,
    but become views of flat tensors; the training loop remains unchanged.

    Collective: every rank creates an optimizer for the same model, and calls `step()` the same number of times. Unless
    `init_sync` is False, construction broadcasts rank 0's parameters, and its buffers if `model` is a module.

    With `shard_gradients=False` (ZeRO-1), you average gradients by other means, such as `GradientAverager`. With
    `shard_gradients=True` (ZeRO-2), `backward()` averages gradients, each rank keeps its part until `step()` frees it,
    and `p.grad` is a placeholder without elements. Code that uses elements of `p.grad`, such as torch's
    `clip_grad_norm_`, `GradScaler` and SAM, raises. Instead, use this class's `clip_grad_norm_`, and bfloat16, which
    needs no loss scaling.

    As with `GradientAverager`, ranks match their backward passes and steps by count: if a rank skips a batch, for
    example after an exception in forward, its next backward pass belongs to the other ranks' current step. A rank that
    skips a batch must also skip that batch's `step()`.

    Args:
        optimizer_class: An elementwise optimizer class, such as SGD, Adam, AdamW and most other torch optimizers.
        model: A module, its parameters, or groups of parameters as for `optimizer_class`.
        comm: Communicator of the ranks that train; the optimizer derives a dedicated communicator from it.
        mesh: Two communicators, (replicate, shard), as in torch's `fully_shard`: states are divided among the ranks of
            `shard`, such as those on one host, and the ranks of `replicate` have copies of the same part. The
            `replicate` and `shard` groups of all ranks must be the columns and rows of one grid of the ranks of `comm`;
            gradients are averaged over the whole grid. If `mesh` is None, all ranks have different parts.
        shard_gradients: Whether `backward()` averages gradients and keeps this rank's part of them.
        master_dtype: Dtype in which this rank updates its part, such as `torch.float32` for bfloat16 parameters; by
            default the parameters' own dtype. Optimizer states also have this dtype.
        bucket_cap_mb: With `shard_gradients`, maximum message size in MiB.
        elementwise: Whether the class is known to be elementwise; if False, trial steps on small matrices check it.
        init_sync: Whether to broadcast rank 0's parameters and buffers now.
        defaults: Options for `optimizer_class`.

    Raises:
        ValueError: The class is not elementwise; an argument is out of range; or a parameter cannot be sharded. With
            `shard_gradients`: a parameter has a gradient, or is already averaged or sharded by another object. Raised
            on every rank if `mesh` is not a grid of the ranks of `comm`.
        TypeError: `model` is a single tensor, or contains something other than tensors.
        MismatchError: Ranks have different models or settings. Raised by `step()` on every rank if gradients or options
            differ.
        AbortedError: Raised by `backward()` or `step()` if another rank's backward pass has failed. Gradients are
            dropped.
        PeerLostError, CommTimeoutError: Raised by `step()` if a rank did not take part.
        RuntimeError: Raised by `step()` if a parameter of the module was replaced, added or moved to other memory, if
            the caller set p.grad despite `shard_gradients`, or if gradients accumulated in `no_sync` are not averaged
            yet.

    Cost: for N elements and p ranks, a step sends and receives (p-1)/p N elements, and 8 bytes per rank for checks;
    `shard_gradients` adds one reduce_scatter per bucket. Memory: N elements for parameters, N/p for each state and for
    the master copy, and N for gradients. With `shard_gradients`, gradients need only N/p, plus at most a few buckets.

    On a mesh, p is the number of ranks in `shard`, and each step includes a barrier of all ranks. With
    `shard_gradients`, each part of the gradients is also all-reduced over the r ranks of `replicate`, for which each
    rank sends 2 (r-1)/r N/p elements.

    Method: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020; meshes:
    Zhang et al., "MiCS: Near-linear Scaling for Training Gigantic Model on Public Cloud", VLDB 2022 (HSDP in torch).

    Example:
        >>> def program(comm):
        ...     model = torch.nn.Linear(2, 1, bias=False)
        ...     torch.nn.init.ones_(model.weight)
        ...     optimizer = un.sharding.ShardedOptimizer(torch.optim.SGD, model, comm, shard_gradients=True, lr=0.5)
        ...     model(torch.full((1, 2), float(comm.rank))).sum().backward()
        ...     optimizer.step()
        ...     return model.weight.tolist()
        >>> un.launch(program, nprocs=3, backend="thread")
        [[[0.5, 0.5]], [[0.5, 0.5]], [[0.5, 0.5]]]
    """

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        model: torch.nn.Module | Iterable[Any],
        comm: Communicator,
        *,
        mesh: Mesh | None = None,
        shard_gradients: bool = False,
        master_dtype: torch.dtype | None = None,
        bucket_cap_mb: float = 25,
        elementwise: bool = False,
        init_sync: bool = True,
        **defaults: Any,
    ) -> None:
        groups = named_groups(model)
        named = [pair for group in groups for pair in group["params"]]
        check_shardable(named, master_dtype)
        cap = in_bytes(bucket_cap_mb if shard_gradients else float("inf"))
        assert cap is not None
        self._comms = ShardComms(comm, mesh)
        self._settings = {
            "optimizer": optimizer_class.__qualname__,
            "shard_gradients": shard_gradients,
            "master_dtype": master_dtype,
            "bucket bytes": cap,
            "parameters of each group": [len(g["params"]) for g in groups],
        }
        agree_on_parameters(named, self._comms.base, self._settings, hooked=shard_gradients)
        if shard_gradients:
            check_unclaimed(named)
            warn_of_norm_limits(model)
        self._named = named
        self._members = ModelMembers(model, named)
        self._steps = 0
        # Indices of the parameters that were updated at least once.
        self._touched = set[int]()
        order = [i for i, (_, p) in reversed(list(enumerate(named))) if p.requires_grad]
        frozen = [i for i, (_, p) in enumerate(named) if not p.requires_grad]
        parameters = [p for _, p in named]
        plans = [plan_buckets(parameters, order, cap), plan_buckets(parameters, frozen, cap)]
        with torch.no_grad():
            if init_sync:
                buffers = list(model.named_buffers()) if isinstance(model, torch.nn.Module) else []
                share([*named, *buffers], self._comms.base, model=model, hint=INIT_SYNC)
            made = [[ParameterBucket(b, [named[i] for i in b], self._comms, master_dtype) for b in p] for p in plans]
        self._buckets = made[0] + made[1]
        self._frozen = made[1]
        placed = {i: (b, slot) for b in self._buckets for slot, i in enumerate(b.indices)}
        # For each parameter, its bucket and its slot in that bucket.
        self._places = [placed[i] for i in range(len(named))]
        self._pieces = [bucket.pieces[slot] for bucket, slot in self._places]
        pieces = iter(self._pieces)
        cut = [{**group, "params": [next(pieces) for _ in group["params"]]} for group in groups]
        self._shards = shard_optimizer(optimizer_class, cut, elementwise=elementwise, **defaults)
        # Claim the parameters last, so that they are not claimed if creating the optimizer has failed.
        self._claim = claim(named, "sharded", "ShardedOptimizer") if shard_gradients else None
        self._sharder = GradientSharder(made[0], self._comms) if shard_gradients else None
        super().__init__([{**g, "params": [p for _, p in g["params"]]} for g in groups], self._shards.defaults)
        self.state: defaultdict[torch.Tensor, Any] = self._shards.state
        self._created = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise an error, because all parameters must be passed when the optimizer is created.

        Args:
            param_group: Ignored.

        Raises:
            RuntimeError: Always.

        Example:
            >>> optimizer = un.sharding.ShardedOptimizer(torch.optim.SGD, torch.nn.Linear(2, 1), un.init())
            >>> optimizer.add_param_group({"params": []})
            Traceback (most recent call last):
            ...
            RuntimeError: a ShardedOptimizer takes no further groups. Create a new one with all parameters
        """
        if getattr(self, "_created", False):
            raise RuntimeError("a ShardedOptimizer takes no further groups. Create a new one with all parameters")
        super().add_param_group(param_group)

    # -- training -------------------------------------------------------------------------------
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters on all ranks. Collective.

        Args:
            closure: Function that computes the loss and its gradients; called first, with gradients enabled.

        Returns: The closure's result.

        Raises:
            MismatchError, AbortedError, RuntimeError: See the class; no parameter has changed.
            Exception: The closure or the optimizer class raised. The other ranks raise an `AbortedError` that names the
                error. An error during the update may leave different parameters on different ranks, so all later steps
                raise as well.
        """
        loss = None
        present: list[bool] = []
        problem: Exception | None = None
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            present = self._prepare()
        except Exception as error:
            problem = error
        self._compare(present, problem)
        try:
            self._update(present)
        except BaseException as error:
            self._comms.fail_step(error)
            raise
        self._steps += 1
        return loss

    def _update(self, present: Sequence[bool]) -> None:
        """Update this rank's part, and gather all ranks' parts."""
        for bucket in self._buckets:
            bucket.follow_parameters()
        self._share_options()
        self._shards.step()
        self._show_options()
        self._touched.update(i for i, there in enumerate(present) if there)
        changed = {id(self._places[i][0]): self._places[i][0] for i, there in enumerate(present) if there}
        self._gather(list(changed.values()))

    def _prepare(self) -> list[bool]:
        """Assign each piece its gradient, and check the gradients. Return which parameters have a gradient."""
        problem = self._members.problem()
        if problem is not None:
            raise RuntimeError(f"{problem}. Call remove() on the optimizer, and create a new one")
        for bucket in self._buckets:
            bucket.check()
        if self._sharder is not None:
            for bucket in self._frozen:
                bucket.check_frozen()
            self._sharder.check_reduced()
            self._sharder.follow_zero_grad()
            return [piece.tensor.grad is not None for piece in self._pieces]
        for bucket in self._buckets:
            bucket.cut_gradients()
        return [p.grad is not None for _, p in self._named]

    def _compare(self, present: Sequence[bool], problem: Exception | None) -> None:
        """Raise on all ranks if a rank has failed or takes a different step. No parameter has changed yet."""
        grads = [] if self._sharder is not None else [p.grad for _, p in self._named if p.grad is not None]
        names = [name for name, _ in self._named]
        try:
            check_same_step(names, present, self.param_groups, grads, self._steps, self._comms.live.data, problem)
        except BaseException:
            if problem is None:
                self._free_gradients()
            raise

    def _gather(self, buckets: Sequence[ParameterBucket]) -> None:
        if not buckets or self._comms.live.replicate is not None:
            # Without this barrier, a rank could begin its next backward pass, and fail in it, before all other ranks
            # know that this training step is valid.
            self._comms.base.barrier()
        for work in [self._comms.run(bucket.start_gather) for bucket in buckets]:
            self._comms.run(work.wait)
        # Let autograd detect a backward pass through the old values.
        torch.autograd.graph.increment_version([p for bucket in buckets for p in bucket.parameters])
        self._free_gradients()

    def _free_gradients(self) -> None:
        """Free the gradients of this rank's part."""
        if self._sharder is not None:
            self._sharder.drop()
        for piece in self._pieces:
            piece.tensor.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free all gradients.

        Args:
            set_to_none: Whether p.grad becomes None; if False, unsharded gradients are filled with zeros.

        Raises:
            ValueError: Sharded gradients cannot be filled with zeros, because `step()` has freed them.
        """
        if self._sharder is not None:
            if not set_to_none:
                raise ValueError("step() has freed the sharded gradients, so none can be zeroed. Pass set_to_none=True")
            self._sharder.drop()
        super().zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients so that their norm over all parameters is at most `max_norm`. Collective.

        Args:
            max_norm: Maximum norm.
            norm_type: Order of the norm: positive, or `inf`.

        Returns: The norm before scaling, as a 0-d tensor. The norm is the same on all ranks and equals, up to rounding,
        the result of `torch.nn.utils.clip_grad_norm_` on whole gradients.

        Example:
            >>> def program(comm):
            ...     w = torch.nn.Parameter(torch.zeros(2))
            ...     optimizer = un.sharding.ShardedOptimizer(torch.optim.SGD, [w], comm, shard_gradients=True, lr=1.0)
            ...     (w * torch.tensor([3.0, 4.0])).sum().backward()
            ...     norm = optimizer.clip_grad_norm_(1.0)
            ...     optimizer.step()
            ...     return norm.item(), [round(x, 3) for x in w.tolist()]
            >>> un.launch(program, nprocs=2, backend="thread")
            [(5.0, [-0.6, -0.8]), (5.0, [-0.6, -0.8])]
        """
        if self._sharder is None:
            return torch.nn.utils.clip_grad_norm_([p for _, p in self._named], max_norm, norm_type)
        self._sharder.check_reduced()
        self._sharder.follow_zero_grad()
        pieces = [piece.tensor for piece in self._pieces]
        return self._comms.run(clip_grad_norm_, pieces, max_norm, self._comms.live.shard, norm_type)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which `backward()` only accumulates this rank's gradients; needs `shard_gradients`.

        Accumulated gradients are unsharded until the next pass outside the context averages their sum.

        Raises:
            RuntimeError: Gradients are not sharded; use the averager's `no_sync`.
        """
        if self._sharder is None:
            raise RuntimeError("this optimizer averages no gradients, so it has no no_sync(); see shard_gradients=True")
        with replaced([(self._sharder, "sync", False)]):
            yield

    def abort(self, reason: str) -> None:
        """Abort current and later collectives on all ranks, for example after an error that other ranks can't see.

        Args:
            reason: Text for the `AbortedError` of the other ranks.

        Example:
            >>> def program(comm):
            ...     optimizer = un.sharding.ShardedOptimizer(torch.optim.SGD, torch.nn.Linear(2, 1), comm)
            ...     if comm.rank == 0:
            ...         optimizer.abort("no disk space")
            ...     try:
            ...         optimizer.step()
            ...     except un.errors.AbortedError as error:
            ...         return "no disk space" in str(error)
            >>> un.launch(program, nprocs=2, backend="thread")
            [True, True]
        """
        self._comms.abort_all(reason)

    def remove(self) -> None:
        """Remove the hooks, and release the communicator.

        The optimizer is unusable afterwards; the model is unaffected.
        """
        if self._sharder is not None:
            self._sharder.remove()
            release(p for _, p in self._named)
        self._comms.close()

    def _share_options(self) -> None:
        """Copy the options from the caller's groups to the optimizer of this rank's part."""
        for mine, theirs in zip(self.param_groups, self._shards.param_groups, strict=True):
            theirs.update({key: value for key, value in mine.items() if key not in NO_OPTIONS})

    def _show_options(self) -> None:
        """Copy the options from the optimizer of this rank's part to the caller's groups."""
        for mine, theirs in zip(self.param_groups, self._shards.param_groups, strict=True):
            mine.update({key: value for key, value in theirs.items() if key != "params"})

    def state_dict(self) -> dict[str, Any]:
        """Return the state of an unsharded optimizer, with `TensorShard`s in place of tensors of a parameter's shape.

        `unisono.checkpoint` saves the shards as whole tensors. This method does not communicate. With `master_dtype`,
        the state of each updated parameter includes its master copy as "master".
        """
        self._share_options()
        state = self._shards.state_dict()
        for index in sorted(self._touched):
            bucket = self._places[index][0]
            piece = self._pieces[index]
            if bucket.has_master:
                state["state"].setdefault(index, {})[_MASTER] = piece.wrap(piece.tensor.detach())
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a saved state.

        Args:
            state_dict: Result of `state_dict` on the same rank, or an unsharded optimizer's state with whole tensors.
                `unisono.checkpoint.load` reads a rank's state from a checkpoint saved by any number of ranks.

        Raises:
            ValueError: The state belongs to different parameters or groups, or to another rank.
        """
        # Keep entries with other keys: an optimizer class may have states that belong to no parameter.
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
    def move_to(self, comm: Communicator, mesh: Mesh | None = None) -> None:
        """Divide the states among the ranks of another communicator. Collective over the new communicator.

        Parameters, hooks and the optimizer remain the same objects. Gradients are dropped. States are undefined until
        they are loaded, and parameters remain unchanged on each rank; `un.elastic.Recovery` restores both.

        Args:
            comm: The new communicator, such as the result of `comm.rebuild()`.
            mesh: A mesh of the new communicator's ranks; see the class.

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
        self._comms.move_to(comm, mesh)
        agree_on_parameters(self._named, self._comms.base, self._settings)
        self.zero_grad()
        for bucket in self._buckets:
            bucket.recut()

    def snapshot(self) -> dict[str, Any]:
        """Return `state_dict()`, together with this rank's part of the parameters. See `un.elastic.Recovery`.

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
            snapshot: Snapshot with the same keys and shard ranges as the result of `snapshot` on the current ranks.

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

    def shard_range(self, path: Sequence[Any]) -> tuple[int, int]:
        """Return this rank's range of a parameter, as start and stop in the flattened parameter.

        Args:
            path: Keys that lead to the parameter, or to one of its states, in `snapshot()`.

        Example:
            >>> model = torch.nn.Linear(3, 1)
            >>> optimizer = un.sharding.ShardedOptimizer(torch.optim.SGD, model, un.init("thread"))
            >>> optimizer.shard_range(["parameters", 0])
            (0, 3)
        """
        piece = self._pieces[path[1]]
        return piece.start, piece.stop


_MASTER = "master"
_PARAMETERS = "parameters"
_STEPS = "steps"
_REPEAT = "a backward pass failed there, so all ranks drop the gradients of this step. Repeat it"


class GradientSharder(PassOwner):
    """Hooks that average the gradients of bucketed parameters, and keep this rank's part of them.

    A bucket is reduced when it and all earlier buckets have their gradients, or at the end of the backward pass. So all
    ranks reduce all buckets in the same order, even if some gradients are missing. While a gradient is in a bucket,
    p.grad is a placeholder without memory. If the caller replaces the placeholder with None, the gradient is dropped.

    Args:
        buckets: Buckets of trained parameters, in the expected order of their gradients.
        comms: Communicators of the ranks that average the gradients.

    Attributes:
        sync: Whether backward passes reduce gradients.
    """

    def __init__(self, buckets: Sequence[ParameterBucket], comms: ShardComms) -> None:
        self._buckets = buckets
        self._comms = comms
        self.sync = True
        self._watch = PassWatch("ShardedOptimizer", comms)
        self._pass = BackwardTracker(self, [p for bucket in buckets for p in bucket.parameters], self._watch)
        self._next = 0
        self._syncing = self._early = True
        # Whether there were gradients from earlier backward passes when the current backward pass began.
        self._held = False
        # Whether an earlier pass has failed and its error has already been raised on this rank.
        self.is_broken = False
        # Value of `_watch.errors` when the last pass began.
        self._errors = 0
        # The error that `end` raises because other ranks have dropped gradients that this rank still has.
        self._lost: CommError | None = None
        self._handles: list[Any] = []
        # For each parameter: its bucket's gradient, its slot in the bucket, the parameter, its piece, and its
        # placeholder.
        self._places: list[tuple[FlatGradient, int, torch.Tensor, ParameterPiece, ShardedGradient]] = []
        take = weak_method(self._take)
        for number, bucket in enumerate(buckets):
            for slot, parameter in enumerate(bucket.parameters):
                placeholder = ShardedGradient.of(parameter)
                self._places.append((bucket.gradient, slot, parameter, bucket.pieces[slot], placeholder))
                self._handles += [
                    parameter.register_hook(partial(self._pass.arrive, slot)),
                    parameter.register_post_accumulate_grad_hook(partial(take, number, slot)),
                ]

    def begin(self) -> None:
        """Begin a backward pass."""
        error = self._comms.live.data.exception()
        # An error raised in another model also counts as raised: if ranks wait for each other in two models, both
        # models are aborted, and each rank raises in the model in which it waits. After such an abort, all ranks repeat
        # the training step. They must agree that this pass belongs to the repetition, because a rank that raised again
        # here would leave the other ranks waiting in `renew`.
        repeats = self._comms.live.reported or self._errors != self._watch.errors
        self._errors = self._watch.errors
        if error is not None and not repeats:
            # Another rank's backward pass has failed. That rank will repeat its forward pass, during which other models
            # may communicate. Raise, so that this rank also repeats its forward pass, instead of waiting for the failed
            # rank at the end of this backward pass.
            raise error
        self.is_broken = error is not None
        # A reduction may block until all ranks take part. If there are several models, their gradients arrive in any
        # order, so reductions start at the end of the backward pass, in an order that is the same on all ranks. After a
        # failure, reductions also start at the end, because the communicators must be replaced first.
        self._early = error is None and self._is_alone
        self._check_placeholders()
        self.follow_zero_grad()
        self._next = 0
        self._syncing = self.sync
        for bucket in self._buckets:
            bucket.gradient.arrived.clear()
        for _, _, parameter, _, placeholder in self._places:
            if parameter.grad is placeholder:
                parameter.grad = None
        self._held = any(
            gradient.taken or gradient.reduced or piece.tensor.grad is not None
            for gradient, _, _, piece, _ in self._places
        )

    def renew(self) -> None:
        """Replace the communicators after a failed pass of this model, or of another model in the same pass."""
        self._comms.abort(_REPEAT)
        error = self._comms.live.data.exception()
        assert error is not None
        try:
            self._comms.replace()
        except PeerLostError as lost:
            if isinstance(error, ClosedError):
                raise
            # The rank whose backward pass failed is lost and won't repeat its forward pass, so raise the error.
            raise error from lost
        # Let `end` raise this error, because an error raised here would skip the creation of the remaining models'
        # communicators, which is collective.
        self._lost = error if self._held else None

    @torch.no_grad()
    def _take(self, number: int, slot: int, parameter: torch.Tensor) -> None:
        """Hook: a gradient has been added to p.grad."""
        bucket = self._buckets[number]
        grad = parameter.grad
        if grad is None:
            raise self._pass.failed(
                RuntimeError(
                    f"a hook has taken the gradient of {bucket.pieces[slot].name!r} away before it was averaged. Make "
                    "the step after backward() has returned"
                )
            )
        if grad.layout != torch.strided:
            raise self._pass.failed(
                ValueError(f"the gradient of {bucket.pieces[slot].name!r} is sparse, which cannot be sharded")
            )
        if self._syncing and number < self._next:
            raise self._pass.failed(
                RuntimeError(
                    f"{bucket.pieces[slot].name!r} got a second gradient in one backward pass when the first one had "
                    "been averaged, as a shared parameter does under re-entrant checkpointing. Pass "
                    "use_reentrant=False there"
                )
            )
        bucket.gradient.take(slot, grad)
        parameter.grad = None
        while self._syncing and self._early and self._is_full(self._next):
            self._reduce()

    @property
    def _is_alone(self) -> bool:
        return len(self._watch.peers) == 1

    def _is_full(self, number: int) -> bool:
        # After the last bucket, the slice is empty.
        return any(len(b.gradient.arrived) == len(b.parameters) for b in self._buckets[number : number + 1])

    def _reduce(self) -> None:
        bucket = self._buckets[self._next]
        gradient = bucket.gradient
        self._next += 1
        if not gradient.taken:
            # Other ranks may have gradients in this bucket, so contribute zeros, which do not count as a gradient.
            gradient.take(0, torch.zeros_like(bucket.parameters[0]))
            gradient.taken.clear()
        if self._next > 1:
            # Finish the previous bucket, so that at most one whole bucket is in flight.
            self._buckets[self._next - 2].gradient.finish_reduce()
        gradient.start_reduce()

    @torch.no_grad()
    def end(self) -> None:
        """Average the gradients of the pass. Collective except in `no_sync`."""
        if self._lost is not None:
            raise self._lost
        if self._syncing:
            while self._next < len(self._buckets):
                self._reduce()
            for bucket in self._buckets:
                bucket.gradient.commit(bucket.pieces)
        for gradient, slot, parameter, piece, placeholder in self._places:
            if slot in gradient.taken or piece.tensor.grad is not None:
                parameter.grad = placeholder

    def fail(self) -> None:
        """Drop the gradients of this step, because other ranks may have received some gradients of the failed pass."""
        self.drop()
        self._comms.abort(f"a backward pass failed there: {self._pass.cause}" if self._pass.cause else _REPEAT)
        self._lost = None

    # -- from step to step ----------------------------------------------------------------------
    def follow_zero_grad(self) -> None:
        """Drop gradients whose placeholder was removed, for example by `model.zero_grad()`."""
        for gradient, slot, parameter, piece, placeholder in self._places:
            if parameter.grad is not placeholder:
                piece.tensor.grad = None
                gradient.taken.discard(slot)

    def _check_placeholders(self) -> None:
        """Raise `RuntimeError` if the caller has set a p.grad."""
        for _, _, parameter, piece, placeholder in self._places:
            if parameter.grad is not None and parameter.grad is not placeholder:
                raise RuntimeError(
                    f"p.grad of {piece.name!r} was set, but sharded gradients come from backward() only. Set it to "
                    "None, or create the optimizer with shard_gradients=False"
                )

    def check_reduced(self) -> None:
        """Raise `RuntimeError` if gradients from `no_sync` are not averaged, or the caller has set a p.grad."""
        self._check_placeholders()
        if any(bucket.gradient.taken for bucket in self._buckets):
            raise RuntimeError(
                "gradients of backward passes in no_sync() are not averaged yet. Run the last backward() of a step "
                "outside of no_sync()"
            )

    def drop(self) -> None:
        """Drop all gradients."""
        for bucket in self._buckets:
            bucket.gradient.drop()
        for _, _, parameter, piece, _ in self._places:
            parameter.grad = piece.tensor.grad = None

    def remove(self) -> None:
        """Remove the hooks, and drop all gradients."""
        for handle in self._handles:
            handle.remove()
        self._pass.forget()
        self._watch.remove()
        self.drop()
