"""Hooks on a plain model that average its gradients during `backward()`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from functools import partial
from operator import attrgetter
from threading import Thread
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from weakref import ref

import torch

from unisono.communicator import Communicator, boundaries_of
from unisono.core.notebook import html_table
from unisono.core.types import Work
from unisono.core.work import format_bytes
from unisono.errors import AbortedError, CommError
from unisono.gradients.bucket import GradientBucket
from unisono.gradients.parameter_registry import ParameterRegistry
from unisono.gradients.reducer import Reducer, codec_for
from unisono.gradients.sparse import average_sparse, sparse_parameters
from unisono.gradients.weights import (
    AllRanksDone,
    ErrorContext,
    Weights,
    check_average,
    check_skipped,
    used_gradients,
    warn_of_uneven_batches,
)
from unisono.utils.backward_pass import BackwardTracker, SavedGradients, adds_to_leaves, current_pass, watch_outputs
from unisono.utils.flatten import broadcast_all, bucket_sizes, in_bytes
from unisono.utils.parameters import INIT_SYNC, agree_on_parameters, named_tensors, share, share_buffers
from unisono.utils.pass_watch import PassWatch
from unisono.utils.replaceable_comms import ReplaceableComms

if TYPE_CHECKING:
    from unisono.compression.codec import Codec

__all__ = ["AveragerComms", "GradientAverager"]

_post_accumulate_hooks = attrgetter("_post_accumulate_grad_hooks")
_version = attrgetter("_version")


class AveragerComms(ReplaceableComms):
    """Communicators of an averager: those in use are replaced after a pass that failed when a part of it had left.

    What travels over `data` is not compared between ranks, so after such a pass a message could meet one of another
    bucket. The origin is aborted too when the averager is of no more use.

    Args:
        comm: The ranks that average. Collective.
        deterministic: Whether sums are reduced in one fixed order; as for `comm` if not.

    Attributes:
        control: Communicator for everything but the buckets.
    """

    def __init__(self, comm: Communicator, *, deterministic: bool = False) -> None:
        super().__init__(comm, deterministic=deterministic, check="off")
        self.control: Communicator = self.base
        self._aborting: Thread | None = None

    def ready(self) -> None:
        """Create `control`. Collective. Earlier operations of any rank are not cut off by an abort on another rank."""
        self.control = self.dup()

    def in_use(self) -> tuple[Communicator, ...]:
        return self.control, self.data

    def replace(self) -> None:
        """Make new ones where a failed pass has aborted the old ones. Collective."""
        self.control.close()
        super().replace()
        self.control = self.dup()

    def abort_pass(self, reason: str, first: Work | None) -> None:
        """End the running pass on all ranks.

        Args:
            reason: For the other ranks' errors.
            first: The reduction of the pass's first bucket, if it is in progress. Until it ends, other ranks may be
                in the previous pass, which has succeeded here and must not be cut off there.
        """
        error = self.data.exception()
        if error is not None and not isinstance(error, AbortedError):
            # A rank was lost or did not join: more than the failure of one pass.
            self.abort_all(f"averaging has failed there: {error}")
        elif first is None:
            self.abort(reason)
        else:
            self._aborting = Thread(target=self._abort_after, args=(first, reason), daemon=True)
            self._aborting.start()

    def _abort_after(self, first: Work, reason: str) -> None:
        with suppress(CommError):
            first.wait()
        self.abort(reason)

    def settle(self) -> None:
        """Wait until an abort of the last pass has begun on all ranks: they reach their first bucket before."""
        if self._aborting is not None:
            self._aborting.join()
            self._aborting = None


class GradientAverager:
    """Hooks that average the gradients of a plain model over all ranks while `backward()` computes them.

    Needs one line before the training loop; the loop, the model and the optimizer stay unchanged. When
    `backward()` returns, each `p.grad` is the mean over all ranks, bitwise identical on each. The hooks keep
    the averager alive, so the caller need not keep a reference. Torch hides such hooks from the garbage collector:
    an unused model is freed only after `remove()`.

    Collective: every rank creates one for the same model, and calls `backward()` equally often. Gradients
    are views of the averager's memory: clone a gradient to keep it past the next `backward()`.

    Args:
        model: A module, or its parameters.
        comm: The ranks that average. The averager communicates over three communicators of its own, derived from it.
        bucket_cap_mb: Size of a message in MiB, a compromise of latency and overlap: by default 25 where a message
            is sent while others fill (`comm.overlaps`) or is compressed, and no limit elsewhere.
        first_bucket_mb: Size of the first message: by default 1 if each rank has a core that reduces it while
            others fill.
        compression: A codec of `unisono.compression`, its name, or None.
        average: "mean", or "sum" for losses that are divided by the global batch already. A sum adds up all that
            `p.grad` holds, so zero the gradients of earlier steps first.
        find_unused_parameters: Whether ranks may lack a gradient that others have: they contribute zeros. Pass the
            module, not its parameters, if a rank may lack all gradients.
        init_sync: Whether to broadcast rank 0's parameters and buffers now.
        broadcast_buffers: Whether to broadcast rank 0's buffers after each backward pass.
        deterministic: Whether gradients are summed in one fixed order, whatever the backend, its algorithms and the
            bucket sizes; see `unisono.init`. On any number of ranks: see `un.gradients.LogicalShards`.

    Raises:
        ValueError: Another averager has the model, or a part of it; or an argument is out of range.
        TypeError: `model` is a single tensor, or contains something other than tensors.
        MismatchError: Ranks have different models or settings; or, from `backward()` and on every rank, some
            rank has no gradient that others have, without `find_unused_parameters`.
        AbortedError: From `backward()`: another rank's pass has failed half-way, or its model has changed; or, within a
            second, ranks run the passes of several averagers in different orders.
        RuntimeError: From a forward, from `backward()` or from `check()`: a parameter was replaced, swapped or added.
        CommTimeoutError, PeerLostError: From `backward()`: a rank did not join; names the parameters.

    A backward pass that raises is undone on its rank: p.grad and the settings of `no_sync` and `weight` are restored.
    If a part of the pass had been sent, all ranks drop the pass, and the next one is correct. Passes are paired by
    their number: where a rank skips a batch, as after an exception in forward, its next one counts in the others' step.
    It must skip the optimizer's step too, and no error tells if not. `un.checkpoint.assert_in_sync` compares models.

    Where several models have an averager each, ranks run their passes in the same order, or in one `backward()` of a
    common loss, which ends them in the order in which the averagers were created, after those of sharded models.

    Cost: for each step one all_reduce a bucket, with two elements a parameter and two more beside the gradients, and
    one copy of each gradient; 1.5 us a parameter for a hook before its gradient is added; a check of all parameters
    before the forward and after the backward (0.1 us each). Memory: one bucket's worth for each gradient, which is the
    gradient itself once backward has ended. The idea of buckets: Li et al., "PyTorch Distributed", VLDB 2020.

    Example:
        >>> def program(comm):
        ...     model = torch.nn.Linear(2, 1, bias=False)
        ...     averager = un.GradientAverager(model, comm)
        ...     model(torch.full((1, 2), float(comm.rank))).sum().backward()
        ...     return model.weight.grad.tolist()
        >>> un.launch(program, nprocs=3, backend="thread")
        [[[1.0, 1.0]], [[1.0, 1.0]], [[1.0, 1.0]]]
    """

    checkpoint_policy: ClassVar[str] = "keep"

    def __init__(
        self,
        model: torch.nn.Module | Iterable[torch.Tensor],
        comm: Communicator,
        *,
        bucket_cap_mb: float | None = None,
        first_bucket_mb: float | None = None,
        compression: str | Codec | Callable[[], Codec] | None = None,
        average: Literal["mean", "sum"] = "mean",
        find_unused_parameters: bool = False,
        init_sync: bool = True,
        broadcast_buffers: bool = False,
        deterministic: bool = False,
    ) -> None:
        self._total = check_average(average)
        self._named = named_tensors(model)
        self._names = [n for n, _ in self._named]
        self._parameters = [p for _, p in self._named]
        self._model = model if isinstance(model, torch.nn.Module) else None
        self._sizes = in_bytes(bucket_cap_mb), in_bytes(first_bucket_mb)
        self._find_unused = find_unused_parameters
        self._sync_buffers = broadcast_buffers
        self._compression = compression
        self._weights = Weights(comm, self._total)
        self._steps = 0
        self._deterministic = deterministic
        if self._deterministic and compression is not None:
            raise ValueError("compressed gradients are not summed in the balanced tree of deterministic=True")
        self._syncing = True
        self._attach(comm, init_sync=init_sync)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which backward passes only add to `p.grad`; the next one outside averages all of it.

        Example:
            >>> def program(comm):
            ...     w = torch.zeros(1, requires_grad=True)
            ...     averager = un.GradientAverager([w], comm)
            ...     with averager.no_sync():
            ...         (w * (comm.rank + 1)).sum().backward()
            ...     (w * (comm.rank + 1)).sum().backward()
            ...     return w.grad.item()
            >>> un.launch(program, nprocs=2, backend="thread")
            [3.0, 3.0]
        """
        before = self._syncing
        self._syncing = False
        try:
            yield
        finally:
            self._syncing = before

    def weight(self, n_samples: float) -> None:
        """Set the weight of this rank's next gradient. Every rank sets one, before `backward()`.

        The mean becomes sum(weight * gradient) / sum(weight). A gradient that several passes in `no_sync` have
        accumulated has one weight: call it once a step.

        Args:
            n_samples: The weight, such as the number of samples; finite, 0 or more.

        Raises:
            ValueError: `n_samples` is negative or not finite, or the averager has average="sum"; from `backward()`,
                the weights of all ranks are 0.
            RuntimeError: A pass in `no_sync` has run since the last call in this step.

        Cost: one more all_gather of 16 bytes in that step.

        Example:
            >>> def program(comm):
            ...     w = torch.zeros(1, requires_grad=True)
            ...     averager = un.GradientAverager([w], comm)
            ...     averager.weight(1 if comm.rank == 0 else 3)
            ...     (w * 4 * comm.rank).sum().backward()
            ...     return w.grad.item()
            >>> un.launch(program, nprocs=2, backend="thread")
            [3.0, 3.0]
        """
        if self._weights.in_use and any(p.grad is not None for p in self._parameters):
            raise RuntimeError(
                "weight() was called again before the pass that averages, and all that p.grad holds has one weight. "
                "With no_sync(), call it once a step, with the number of samples of all micro-batches, and divide the "
                "sum of each micro-batch's losses by that number"
            )
        self._weights.set(n_samples)

    @contextmanager
    def join(self) -> Iterator[None]:
        """Return a context for a loop with uneven numbers of steps: `with averager.join():`.

        A rank that has finished contributes nothing to the others' steps until all have finished; means
        are over the ranks that still have data. At the end all ranks have the parameters of a rank
        that finished last. Collective.

        Cost: one more all_gather of 16 bytes a step.

        Method: that of torch's `Join` (Yu, "Distributed training with uneven inputs", 2021).

        Example:
            >>> def program(comm):
            ...     w = torch.zeros(1, requires_grad=True)
            ...     averager = un.GradientAverager([w], comm)
            ...     gradients = []
            ...     with averager.join():
            ...         for _ in range(comm.rank + 1):
            ...             w.grad = None
            ...             (w * (comm.rank + 1)).sum().backward()
            ...             gradients.append(w.grad.item())
            ...     return gradients
            >>> un.launch(program, nprocs=2, backend="thread")
            [[1.5], [1.5, 2.0]]
        """
        weights = self._weights
        before = self._steps
        weights.joining = weights.uneven = True
        try:
            yield
            weights.here = False
            made = self._steps - before
            with suppress(AllRanksDone):
                while True:
                    self._shadow()
            counts = weights.comm.all_gather_object((made, *self._boundaries.counts))
            by_rank = [steps for steps, *_ in counts]
            self._boundaries.catch_up([count for _, *count in counts])
            # A forward may have assigned buffers.
            tensors = self._parameters if self._model is None else [*self._parameters, *self._model.buffers()]
            broadcast_all(tensors, weights.comm, by_rank.index(max(by_rank)))
        finally:
            weights.joining = False
            weights.here = True
            weights.forget()

    def check(self) -> None:
        """Raise if a parameter was replaced, swapped or added after the averager was created: it is not averaged.

        The averager checks this before each forward of the model and after each backward; call it where neither runs.

        Raises:
            RuntimeError: Names the parameter. The other ranks get an `AbortedError` from their next `backward()`.
        """
        self._registry.check()

    def abort(self, reason: str) -> None:
        """End all running and later calls on all ranks, as when an error was caught that others do not know of.

        Args:
            reason: Text for the `AbortedError` of the other ranks.

        Example:
            >>> def program(comm):
            ...     w = torch.zeros(1, requires_grad=True)
            ...     averager = un.GradientAverager([w], comm)
            ...     if comm.rank == 0:
            ...         averager.abort("no disk space")
            ...     try:
            ...         w.sum().backward()
            ...     except un.errors.AbortedError as error:
            ...         return "no disk space" in str(error)
            >>> un.launch(program, nprocs=2, backend="thread")
            [True, True]
        """
        self._comms.abort_all(reason)

    def remove(self) -> None:
        """Remove the hooks, and release the communicators. Gradients stay unchanged. Idempotent.

        Raises:
            RuntimeError: A backward pass is running.

        Example:
            >>> def program(comm):
            ...     w = torch.zeros(1, requires_grad=True)
            ...     un.GradientAverager([w], comm).remove()
            ...     (w * comm.rank).sum().backward()
            ...     return w.grad.item()
            >>> un.launch(program, nprocs=2, backend="thread")
            [0.0, 1.0]
        """
        if self._pass.is_open:
            raise RuntimeError("remove() was called inside a backward pass; call it after backward()")
        self._registry.remove()
        self._pass.forget()
        self._watch.remove()
        self._reducer.clear()
        self._hook_chunks()
        self._comms.close()

    # -- from step to step ----------------------------------------------------------------------
    @property
    def buckets(self) -> list[list[str]]:
        """The names of the parameters in each message, in the order of messages."""
        return [[self._names[i] for i in bucket.indices] for bucket in self._reducer.buckets]

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps made, and the state of the codecs. Differs from rank to rank."""
        codecs = self._codecs()
        states = [codec.state_dict() for _, codec in codecs]
        return {"steps": self._steps, "buckets": [names for names, _ in codecs], "codecs": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state of the same rank.

        Args:
            state: A result of `state_dict` of an averager with the same model and arguments.

        Raises:
            ValueError: It is of another model, or of other bucket sizes, and a codec has state for them.
        """
        codecs = self._codecs()
        names = [names for names, _ in codecs]
        saved = state["buckets"]
        if saved != names:
            first = next((pair for pair in zip(saved, names, strict=False) if pair[0] != pair[1]), None)
            ends = [f"{part[0]!r} to {part[-1]!r}" for part in first or ()]
            where = f"; a bucket is {ends[0]} in the state, {ends[1]} in the averager" if ends else ""
            raise ValueError(
                f"the state has {len(saved)} buckets with codecs, and this averager has {len(names)}{where}: their "
                "models, bucket sizes or codecs differ"
            )
        for (_, codec), one in zip(codecs, state["codecs"], strict=True):
            codec.load_state_dict(one)
        self._steps = state["steps"]

    def _codecs(self) -> list[tuple[list[str], Codec]]:
        """Codecs with a state, each with the names of its parameters."""
        made = [self._reducer.codec_of(bucket) for bucket in self._reducer.buckets]
        return [(names, codec) for names, codec in zip(self.buckets, made, strict=True) if codec is not None]

    def move_to(self, comm: Communicator) -> None:
        """Switch to the ranks of another communicator, such as the result of `comm.rebuild()`.

        Collective over it; new ranks create their own averager in the meantime. An aborted step is
        discarded. Parameters stay unchanged: make them equal on all ranks (`un.elastic` does).

        A codec's state is dropped, because it may be of a step that other ranks never made.

        Args:
            comm: The new communicator.

        Raises:
            RuntimeError: A backward pass is running.
            MismatchError: Ranks have different models or settings.

        Example:
            >>> def program(comm):
            ...     w = torch.zeros(1, requires_grad=True)
            ...     averager = un.GradientAverager([w], comm)
            ...     averager.move_to(comm.split(comm.rank // 2))
            ...     (w * comm.rank).sum().backward()
            ...     return w.grad.item()
            >>> un.launch(program, nprocs=4, backend="thread")
            [0.5, 0.5, 2.5, 2.5]
        """
        self.remove()
        self._attach(comm, init_sync=False)

    # -- life -----------------------------------------------------------------------------------
    def _attach(self, comm: Communicator, *, init_sync: bool) -> None:
        # Weak: a communicator that a program drops leaves its group.
        self._origin = ref(comm)
        self._registry = ParameterRegistry(self._model, self._named, self._report)
        codec = codec_for(self._compression)
        settings = {
            "bucket sizes": self._sizes,
            "average": self._total,
            "deterministic": self._deterministic,
            "find_unused": self._find_unused,
            "broadcast_buffers": self._sync_buffers,
            "compression": repr(codec),
        }
        buffers = list(self._model.named_buffers()) if self._model is not None and init_sync else []
        agree_on_parameters([*self._named, *buffers], comm, settings, hooked=True)
        if init_sync:
            share([*self._named, *buffers], comm, model=self._model, hint=INIT_SYNC)
        self.rank: int = comm.rank
        self.size: int = comm.size
        self._boundaries = boundaries_of(comm)
        self._comms = AveragerComms(comm, deterministic=self._deterministic)
        data = self._comms.data
        background = data.overlaps and codec is None
        sizes = bucket_sizes(self._sizes, self._parameters, comm, background=background, compressed=codec is not None)
        spread = sparse_parameters(self._model) if self._model is not None else set()
        self._spread = {i for i, p in enumerate(self._parameters) if id(p) in spread}
        self._sparse: list[int] = []
        self._chunk_hooks: list[Any] = []
        # By index, the number of this averager's own hooks that run when p.grad of the parameter has been added to.
        self._own_hooks = Counter[int]()
        self._watched = self._hooked()
        self._callers = self._count_hooks()
        self._taken: set[int] = set()
        self._stays = self._spread | self._watched
        self._saved = SavedGradients(self._parameters, self._stays, self._lies_in_buckets)
        self._reducer = Reducer(self._named, data, codec, sizes, self._weights, self._saved, self._reconnect)
        on_cpu = all(p.is_cpu for p in self._parameters)
        comms = self._comms
        self._watch = PassWatch("GradientAverager", comms.in_use, comms.abort_all)
        self._pass = BackwardTracker(
            self._begin, self._end, self._fail, waits=True, one_thread=on_cpu, watch=self._watch
        )
        self._accumulated: set[int] = set()
        self._versions: list[int] | None = None
        self._syncing = self._early = True
        self._failed = self._reconnected = False
        # If buckets are sent while others fill, the first step of all ranks records the order of gradients.
        self._seen: list[torch.Tensor] | None = [] if self._reducer.background else None
        self._frozen = [i for i, p in enumerate(self._parameters) if not p.requires_grad]
        try:
            if self.size > 1:
                self._install()
            self._comms.ready()
        except BaseException:
            # Its hooks would keep the averager alive, and the parameters claimed.
            self.remove()
            raise
        self._weights.attach(self._comms.control)
        self._weights.forget()

    def _install(self) -> None:
        self._registry.watch_gradients(self._pass.arrive)
        # Watching the output detects a pass that fails before it reaches a parameter, or that reaches none.
        self._registry.watch_forward(self._watch_outputs, traced=self._find_unused)
        # Gradients arrive roughly in the reverse order of parameters.
        self._add_parameters([i for i, p in reversed(list(enumerate(self._parameters))) if p.requires_grad])

    def _report(self, problem: str) -> None:
        """End averaging on all ranks: a model has changed here."""
        self._comms.abort_all(problem)

    def _reconnect(self) -> Communicator:
        """Replace communicators that a failed pass has aborted. Collective."""
        self._comms.replace()
        self._weights.attach(self._comms.control)
        self._reconnected = True
        return self._comms.data

    # -- hooks ----------------------------------------------------------------------------------
    def _add_parameters(self, indices: Sequence[int]) -> None:
        """Average these parameters too, from now on."""
        self._reducer.add([i for i in indices if i not in self._spread])
        self._sparse += [i for i in indices if i in self._spread]
        self._hook_chunks()

    def _hook_chunks(self) -> None:
        """Copy gradients in when the last of a chunk has arrived, except for the last chunk: the pass ends then."""
        while self._chunk_hooks:
            self._chunk_hooks.pop().remove()
        self._own_hooks.clear()
        chunks = [(bucket, slots) for bucket in self._reducer.buckets for slots in bucket.chunks]
        for bucket, slots in chunks[:-1]:
            # Torch accepts no hook of a parameter that is frozen now.
            trained = [slot for slot in slots if bucket.parameters[slot].requires_grad]
            free = [slot for slot in trained if bucket.indices[slot] not in self._stays]
            if free:
                self._hook(bucket.indices[free[-1]], partial(self._on_chunk_ready, bucket, free))
        trained = [i for i, p in enumerate(self._parameters) if p.requires_grad]
        for index in trained:
            if index in self._watched:
                self._hook(index, partial(self._after_hooks, index))
            if self._seen is not None and index in self._reducer.where:
                self._hook(index, self._seen.append)

    def _hook(self, index: int, after: Callable[[torch.Tensor], None]) -> None:
        self._own_hooks[index] += 1
        self._chunk_hooks.append(self._parameters[index].register_post_accumulate_grad_hook(after))

    def _after_hooks(self, index: int, parameter: torch.Tensor) -> None:
        """A hook that follows those of the caller's: one of these may have taken the gradient away."""
        # Torch calls it for one that was frozen after its forward, too, and adds nothing.
        if parameter.grad is None and parameter.requires_grad:
            self._taken.add(index)

    def _count_hooks(self) -> int:
        return sum(map(len, filter(None, map(_post_accumulate_hooks, self._parameters))))

    def _hooked(self) -> set[int]:
        """Return the parameters that have hooks of the caller's: these see what they would see without an averager."""
        own = self._own_hooks
        hooks = enumerate(map(_post_accumulate_hooks, self._parameters))
        return {index for index, table in hooks if table and len(table) > own[index]}

    def _on_chunk_ready(self, bucket: GradientBucket, slots: Sequence[int], _parameter: torch.Tensor) -> None:
        """A hook of the last parameter of a chunk: its gradient has been added to `p.grad`."""
        if self._pass.is_open and self._syncing and not bucket.started:
            staying = self._saved.staying
            if staying:
                # A gradient with a graph stays in p.grad where the pass does not add to it.
                slots = [i for i in slots if bucket.parameters[i].grad is not staying.get(bucket.indices[i])]
            bucket.take(slots)
            if self._early:
                self._reducer.advance()

    def _watch_outputs(self, returned: Any) -> None:
        # Where ranks may lack gradients, a rank also joins the average if its pass reaches no parameter.
        watch_outputs(returned, self._on_output_gradient if self._find_unused else self._pass.follow)

    def _on_output_gradient(self, gradient: torch.Tensor) -> None:
        """Hook: a backward pass has reached an output of the model."""
        if self._registry.hooked and adds_to_leaves(self._registry.ids):
            self._pass.enter(current_pass())

    # -- a pass ---------------------------------------------------------------------------------
    def _begin(self) -> None:
        if self._failed:
            self._comms.settle()
        if self._reconnected:
            self._reducer.rearrange([])
            self._hook_chunks()
            self._reconnected = False
        callers = self._count_hooks() - len(self._chunk_hooks)
        if callers != self._callers:
            self._callers = callers
            self._watched = self._hooked()
            self._stays |= self._watched
            self._hook_chunks()
        # Weights are exchanged before the first bucket leaves. Gradients of several models arrive in any order, so that
        # waits for the end of the pass, which has one order on all ranks. Beside a sharded model all buckets wait: its
        # part of the pass fails on all ranks, some of which may then never send what another one has started.
        alone = len(self._watch.peers) == 1
        self._early = alone or (self._watch.is_of_one_kind and not self._weights.uneven)
        self._taken.clear()
        # A hook that makes a step changes parameters.
        self._versions = list(map(_version, self._parameters)) if callers else None
        self._saved.save()
        if self._failed:
            self._reducer.begin()
            self._failed = False

    @torch.no_grad()
    def _end(self) -> None:
        """Complete the gradients of a pass, and check which ones arrived."""
        self._registry.check()
        arrived = self._saved.arrived()
        # Torch adds nothing to a parameter that was frozen after its forward.
        unchanged = self._pass.arrived - arrived
        others = [i for i in unchanged if self._parameters[i].requires_grad] if unchanged else []
        used = self._used(others) if others or self._callers else ()
        arrived.update(others)
        problem = used_gradients([self._names[i] for i in used]) if used else None
        # An inner pass may have been in no_sync(); what counts is the outermost one.
        if self._syncing:
            self._average(arrived, problem)
            return
        if problem:
            raise RuntimeError(problem)
        self._weights.keep()
        self._accumulated |= arrived
        self._saved.merge()

    def _used(self, others: Sequence[int]) -> list[int]:
        """Return the parameters whose gradient a hook of the caller's has used before it was averaged.

        Args:
            others: Parameters whose gradient has arrived, and is not a new tensor in p.grad.
        """
        gone = [i for i in others if self._parameters[i].grad is None]
        used = sorted(self._taken.union([i for i in gone if not self._reducer.has_taken(i)]))
        if not used and self._versions is not None:
            now = enumerate(map(_version, self._parameters))
            used = [i for i, version in now if version != self._versions[i]]
        return used

    def _average(self, arrived: set[int], problem: str | None) -> None:
        """Average what a pass has computed, and what was accumulated before it. Collective."""
        if self._accumulated:
            arrived |= {i for i in self._accumulated if self._parameters[i].requires_grad}
        thawed = [i for i in self._frozen if self._parameters[i].requires_grad] if self._frozen else []
        self._reducer.finish(arrived, requests=(bool(thawed), bool(problem)))
        asks_thawed, asks_used = self._reducer.asked
        # Without a bucket there was no message to carry the requests.
        if asks_used or (problem and not self._reducer.where):
            self._refuse_used(problem)
        if self._reducer.uneven and not self._find_unused:
            self._look_at(self._reducer.buckets)
        if asks_thawed or (thawed and not self._reducer.where):
            self._on_unfrozen(thawed, arrived)
        averaged = self._average_sparse(arrived) if self._sparse else set()
        if self._sync_buffers and self._model is not None:
            share_buffers(self._model, self._comms.control, self._weights.source)
        if self._weights.here:
            self._reducer.assign()
        else:
            self._saved.restore()
        self._begin_step(averaged)

    def _begin_step(self, averaged: Set[int]) -> None:
        """Be ready for the next pass.

        Args:
            averaged: The parameters with sparse gradients of which a rank had one.
        """
        if self._accumulated:
            # What was accumulated before a parameter was frozen is averaged once it no longer is.
            waiting = {i for i in self._accumulated if not self._parameters[i].requires_grad}
            self._accumulated = {i for i in waiting - averaged if not self._reducer.has_mean(i)}
        self._reducer.begin()
        self._saved.clear()
        self._steps += self._weights.here
        all_took_part = self._weights.active == self.size
        if self._weights.uneven:
            self._weights.forget()
        else:
            warn_of_uneven_batches(self._origin(), self._total)
        if self._seen is not None and all_took_part:
            self._learn_order(self._seen)

    def _learn_order(self, seen: Sequence[torch.Tensor]) -> None:
        """Recreate the buckets, in the order in which rank 0's gradients arrived."""
        self._seen = None
        numbers = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        order = list(dict.fromkeys(numbers[id(parameter)] for parameter in seen))
        self._reducer.rearrange(self._comms.control.broadcast_object(order))
        self._hook_chunks()

    def _fail(self) -> None:
        """Undo a pass that raised: p.grad and weights are as before. Other ranks that have a part of it fail too."""
        self._saved.restore()
        self._failed = True
        if self._reducer.fail():
            self._comms.abort_pass(
                "its backward pass failed after some gradients were averaged, so all ranks drop that pass and "
                "p.grad is unchanged. Continue with the next pass, or repeat this pass on all ranks",
                self._reducer.first_work,
            )

    def _lies_in_buckets(self, index: int, grad: torch.Tensor) -> bool:
        bucket, slot = self._reducer.where.get(index, (None, 0))
        if bucket is not None and bucket.is_place(slot, grad):
            return True
        if not any(bucket.holds(grad) for bucket in self._reducer.buckets):
            return False
        raise RuntimeError(
            f"p.grad of {self._names[index]!r} is memory of the averager for other gradients: it was taken from "
            "another parameter, or is a slice or transpose of its own. Assign a clone() instead"
        )

    def __repr__(self) -> str:
        sizes = f"{len(self._parameters)} parameters in {len(self._reducer.buckets)} buckets"
        return f"<GradientAverager of {sizes}, rank {self.rank} of {self.size}>"

    def _repr_html_(self) -> str:
        numbered = enumerate(self._reducer.buckets)
        rows = {f"bucket {i}": f"{format_bytes(b.memory.nbytes)}: {b.name}" for i, b in numbered}
        return html_table(repr(self)[1:-1], rows)

    # -- the end of a step ----------------------------------------------------------------------
    def _average_sparse(self, arrived: set[int]) -> set[int]:
        """Return the parameters that have a mean now. Collective."""
        # What was accumulated may have been set to None since.
        has = {i for i in self._sparse if i in arrived and self._parameters[i].grad is not None}
        absent = [self._names[i] for i in self._sparse if i not in has and self._weights.here]
        sparse = [self._named[i] for i in self._sparse]
        here = [i in has and self._weights.here for i in self._sparse]
        lacking = None if self._find_unused else absent
        averaged = average_sparse(sparse, self._comms.control, self._weights, here, lacking)
        return {self._sparse[place] for place in averaged}

    def _refuse_used(self, problem: str | None) -> None:
        """Raise on all ranks, because hooks have taken gradients away before they were averaged. Collective."""
        by_rank = self._comms.control.all_gather_object(problem)
        if problem is not None:
            raise RuntimeError(problem)
        rank, problem = next((rank, text) for rank, text in enumerate(by_rank) if text is not None)
        raise AbortedError(
            f"rank {rank} has failed in its backward pass, so all ranks drop that pass: {problem}",
            rank=self.rank,
            size=self.size,
            peer=rank,
        )

    def _shadow(self) -> None:
        """Join a step of the ranks that still have data: contribute nothing, and leave p.grad as it is."""
        self._accumulated.clear()
        self._watch.start()
        try:
            self._begin()
            self._end()
        except BaseException:
            self._fail()
            raise
        finally:
            self._watch.stop()

    def _look_at(self, buckets: Sequence[GradientBucket]) -> None:
        """`MismatchError` on all ranks if some lack a gradient that others have."""
        if not any(had and lacked for bucket in buckets for had, lacked in bucket.found):
            return
        lacking = [
            self._names[i]
            for bucket in buckets
            for i, arrived in zip(bucket.indices, bucket.arrived, strict=True)
            if not arrived
        ]
        by_rank = self._comms.control.all_gather_object(lacking if self._weights.here else [])
        check_skipped(self._names, by_rank, self._weights.active, self._comms.control)

    def _on_unfrozen(self, thawed: list[int], arrived: set[int]) -> None:
        """Parameters that were frozen are no more: average what they have now, and from now on."""
        with ErrorContext(
            f"comparing frozen parameters; no longer frozen on rank {self.rank}: {[self._names[i] for i in thawed]}"
        ):
            agree_on_parameters(self._named, self._comms.control)
        self._frozen = [i for i in self._frozen if i not in thawed]
        known = len(self._reducer.buckets)
        self._add_parameters(thawed)
        self._reducer.finish(arrived, first=known)
        if self._reducer.uneven and not self._find_unused:
            self._look_at(self._reducer.buckets[known:])
