"""Hooks on a plain model that average its gradients during `backward()`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch

from unisono.communicator import Communicator
from unisono.gradients.additions import AdditionWatch
from unisono.gradients.backward import Backward, current_pass, watch_outputs
from unisono.gradients.bucket import Bucket
from unisono.gradients.buckets import broadcast_all, share
from unisono.gradients.hooks import Hooks
from unisono.gradients.join import joined
from unisono.gradients.loads import LoadWatch
from unisono.gradients.moving import Moving, check_unhooked
from unisono.gradients.naming import About, check_skipped
from unisono.gradients.plan import Named, agree_on_parameters, bucket_sizes, in_bytes, named_parameters
from unisono.gradients.reducer import Reducer, codec_for
from unisono.gradients.schedule import BucketSchedule
from unisono.gradients.sparse import average_sparse, sparse_parameters
from unisono.gradients.weights import Weights

if TYPE_CHECKING:
    from unisono.compression.codec import Codec

__all__ = ["GradientAverager"]


class GradientAverager(Moving):
    """Averages the gradients of a plain model over all ranks while `backward()` computes them.

    One line before the training loop; the loop, the model and the optimizer stay as they are. When
    `backward()` returns, each `p.grad` is the mean over all ranks, the same bits on each. The hooks keep
    the averager alive, so it need not be kept. Torch hides such hooks from the garbage collector: a model that
    is done with is freed after `remove()`.

    Collective: every rank makes one, of the same model, and calls `backward()` equally often. Gradients
    are views of the averager's memory: whoever wants one past the next `backward()` clones it.

    Args:
        model: A module, or its parameters.
        comm: Whose ranks average. The averager talks over two communicators of its own, made of it.
        bucket_cap_mb: Size of a message in MiB, a compromise of latency and overlap: by default 25 where a message
            travels while others fill (`comm.overlaps`) or is compressed, and no limit elsewhere.
        first_bucket_mb: Of the first: by default 1 if each rank has a core that reduces it while others fill.
        compression: A codec of `unisono.compression`, its name, or None.
        average: "mean", or "sum" for losses that are divided by the global batch already. A sum adds up all that
            `p.grad` holds, so what earlier steps left there is to be set to zero first.
        find_unused: Whether ranks may lack a gradient that others have: they take part with zeros. Give the module,
            not its parameters, if a rank may lack all.
        sync_parameters: Whether rank 0's parameters and buffers are given to all ranks now.
        sync_buffers: Whether rank 0's buffers are given to all ranks after each backward pass.

    Raises:
        ValueError: Another averager has the model, or a part of it.
        MismatchError: Ranks have different models or settings; or, from `backward()` and on every rank, some
            rank has no gradient that others have, without `find_unused`; or broke a pass off half-way, alone.
        CommTimeoutError, PeerLostError: From `backward()`: a rank did not come; names the parameters.

    Cost: for each step one all_reduce a bucket, with two words a parameter and ten more beside the gradients,
    and one copy of each gradient. Memory: one bucket's worth for each gradient, which is the gradient
    itself once backward is through. The idea of buckets: Li et al., "PyTorch Distributed", VLDB 2020.

    Example:
        >>> def program(comm):
        ...     model = torch.nn.Linear(2, 1, bias=False)
        ...     un.GradientAverager(model, comm)
        ...     model(torch.full((1, 2), float(comm.rank))).sum().backward()
        ...     return model.weight.grad.tolist()
        >>> un.launch(program, nprocs=3, backend="thread")
        [[[1.0, 1.0]], [[1.0, 1.0]], [[1.0, 1.0]]]
    """

    def __init__(
        self,
        model: torch.nn.Module | Iterable[torch.Tensor],
        comm: Communicator,
        *,
        bucket_cap_mb: float | None = None,
        first_bucket_mb: float | None = None,
        compression: str | Codec | Callable[[], Codec] | None = None,
        average: Literal["mean", "sum"] = "mean",
        find_unused: bool = False,
        sync_parameters: bool = True,
        sync_buffers: bool = False,
    ) -> None:
        if average not in ("mean", "sum"):
            raise ValueError(f"average must be 'mean' or 'sum', not {average!r}")
        self._named = named_parameters(model)
        self._names, self._parameters = [n for n, _ in self._named], [p for _, p in self._named]
        self._model = model if isinstance(model, torch.nn.Module) else None
        self._sizes = in_bytes(bucket_cap_mb), in_bytes(first_bucket_mb)
        self._average, self._find_unused, self._sync_buffers = average, find_unused, sync_buffers
        self._compression = compression
        self._weights, self._steps = Weights(comm, average == "sum"), [0]
        self._attach(comm, sync_parameters=sync_parameters)

    def _attach(self, comm: Communicator, *, sync_parameters: bool) -> None:
        check_unhooked(self._named)
        codec = codec_for(self._compression)
        settings = (*self._sizes, self._average, self._find_unused, self._sync_buffers, repr(codec))
        buffers = list(self._model.named_buffers()) if self._model is not None and sync_parameters else []
        agree_on_parameters([*self._named, *buffers], comm, settings)
        if sync_parameters:
            share([*self._named, *buffers], comm)
        self._talk, self._comm = comm.dup(), comm.dup(check="off")
        # Where there is a GPU, hooks run in threads of autograd.
        self._talk.share()
        self._comm.share()
        self.rank, self.size = comm.rank, comm.size
        self._weights.comm = self._talk
        self._weights.forget()
        reducer = Reducer(self._comm, codec)
        how = {"background": reducer.background, "compressed": codec is not None}
        sizes = bucket_sizes(self._sizes, self._parameters, self._talk, **how)
        self._schedule = BucketSchedule(self._named, reducer, sizes, self._weights, self._talk.all_gather_object)
        self._where = self._schedule.where
        self._backward = Backward(self._finish, self._abandon)
        self._hooks: dict[int, Any] = {}
        self._short = Hooks(self._arrived, self._schedule.advance)
        self._sparse: Named = []
        self._owed: set[int] = set()
        self._additions: AdditionWatch | None = None
        self._syncing = True
        # Where buckets travel while others fill, the first step of all ranks tells in which order gradients come.
        self._seen: dict[int, None] | None = {} if self._comm.overlaps and codec is None else None
        self._frozen = [i for i, p in enumerate(self._parameters) if not p.requires_grad]
        if self.size == 1:
            return
        if self._find_unused and self._model is not None:
            # A rank whose backward pass comes to no parameter at all takes part too.
            self._hooks[-1] = watch_outputs(self._model, self._passing)
        if self._model is not None:
            self._hooks[-2] = LoadWatch(self._model, self._parameters)
            self._hooks[-3] = self._additions = AdditionWatch(self._model, self._parameters)
        for index, parameter in enumerate(self._parameters):
            self._watch(index, parameter)
        # Gradients come about in the reverse order of parameters.
        self._adopt([i for i, p in reversed(list(enumerate(self._parameters))) if p.requires_grad])

    # -- what users call ------------------------------------------------------------------------
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside it only add to `p.grad`; the next one outside averages all of it."""
        self._backward.settle()
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def weight(self, n_samples: float) -> None:
        """What this rank's next gradient weighs, such as its number of samples. Every rank says one.

        The mean becomes sum(weight * gradient) / sum(weight). Call it before `backward()`. Zero is allowed.

        Cost: one more short all_reduce in that step.
        """
        self._backward.settle()
        self._weights.say(n_samples)

    def join(self) -> AbstractContextManager[None]:
        """`with averager.join():` around a loop that has fewer steps on some ranks than on others.

        A rank that is through takes part in the others' steps with nothing, until all are through; means
        are over the ranks that still have data. At the end all ranks have the parameters of
        one that was last. Collective. Cost: one more short all_reduce a step.
        """
        tensors = self._parameters if self._model is None else [*self._parameters, *self._model.buffers()]
        return joined(tensors, self._weights, self._shadow, self._steps)

    def remove(self) -> None:
        """Take the hooks off, and let go of the communicators. Gradients stay as they are. Again is harmless."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        self._short.forget()
        if self._backward.running == current_pass():
            self._schedule.give_back()
        self._backward.forget()
        self._schedule.clear()
        self._talk.close()
        self._comm.close()

    # -- hooks ----------------------------------------------------------------------------------
    def _watch(self, index: int, parameter: Any) -> None:
        """Also one that is frozen, for it may be the first that is not: torch takes no hook while it is."""
        frozen = not parameter.requires_grad
        if frozen and (parameter.is_inference() or not (parameter.is_floating_point() or parameter.is_complex())):
            return
        parameter.requires_grad_(True)
        self._hooks[index] = parameter.register_post_accumulate_grad_hook(self._short.make(index))
        parameter.requires_grad_(not frozen)

    def _adopt(self, indices: Sequence[int]) -> None:
        """Average these parameters too, from now on."""
        spread = sparse_parameters(self._model) if self._model is not None else set()
        self._schedule.add([i for i in indices if id(self._parameters[i]) not in spread])
        self._sparse += [self._named[i] for i in indices if i not in self._where]
        self._short.place(self._where)

    def _arrived(self, index: int, parameter: torch.Tensor) -> None:
        """A parameter's gradient has been added to `p.grad`."""
        if not self._syncing:
            self._owed.add(index)
            return
        if current_pass() != self._backward.running:
            self._passing()
        if (where := self._where.get(index)) is not None:
            if self._seen is not None:
                self._seen[index] = None
            bucket, slot = where
            if bucket.arrived(slot):
                self._schedule.advance()

    def _passing(self) -> None:
        """A backward pass is running."""
        number = current_pass()
        if number != self._backward.running and self._syncing and self._hooks:
            self._backward.enter(number)
            self._schedule.open()
            if self._seen is None:  # In the first step the order is of interest, too.
                self._short.note(number)

    # -- the end of a step ----------------------------------------------------------------------
    def _finish(self) -> None:
        """The end of the outermost backward pass: all that is left, and a look at what came."""
        self._complete()
        self._steps[-1] += 1
        if self._seen is not None and self._weights.active == self.size:
            seen, self._seen = list(self._seen), None
            self._schedule.rearrange(self._talk.broadcast_object(seen))
            self._short.place(self._where)

    def _finish_step(self) -> None:
        if self._additions is not None:
            self._additions.check()
        for index in self._owed & self._where.keys():
            bucket, slot = self._where[index]
            # It may have been set to None since.
            if not bucket.started and not bucket.came[slot] and self._parameters[index].grad is not None:
                bucket.arrived(slot)
        thawed = [i for i in self._frozen if self._parameters[i].requires_grad]
        self._look_at(self._schedule.finish(asks=bool(thawed)))
        # Without a bucket nobody could be told.
        if self._schedule.asked or (thawed and not self._where):
            self._take_in(thawed)
        average_sparse(self._sparse, self._talk, self._weights, find_unused=self._find_unused)
        if self._sync_buffers and self._model is not None:
            broadcast_all(self._model.buffers(), self._talk)

    def _shadow(self) -> None:
        """Take part in a step of the ranks that still have data, with nothing."""
        self._backward.settle()
        for parameter in self._parameters:
            parameter.grad = None
        self._complete()

    def _complete(self) -> None:
        try:
            with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
                self._finish_step()
        finally:
            self._abandon()

    def _look_at(self, found: Sequence[tuple[Bucket, list[tuple[bool, bool]]]]) -> None:
        """`MismatchError` on all ranks if some lack a gradient that others have."""
        if self._find_unused or not any(had and lacked for b, p in found if p is not b.complete for had, lacked in p):
            return
        lacking = [
            self._names[i]
            for bucket, _ in found
            for i, came in zip(bucket.indices, bucket.came, strict=True)
            if not came
        ]
        by_rank = self._talk.all_gather_object(lacking if self._weights.here else [])
        check_skipped(self._names, by_rank, self._weights.active, self._talk)

    def _take_in(self, thawed: list[int]) -> None:
        """Parameters that were frozen are no more: average what they have now, and from now on."""
        with About(f"comparing what is frozen; no longer so on rank {self.rank}: {[self._names[i] for i in thawed]}"):
            agree_on_parameters(self._named, self._talk)
        self._frozen = [i for i in self._frozen if i not in thawed]
        known = len(self._schedule.buckets)
        self._adopt(thawed)
        for index in thawed:
            if index in self._where and self._parameters[index].grad is not None:
                bucket, slot = self._where[index]
                bucket.arrived(slot)
        self._look_at(self._schedule.finish(first=known))

    def _abandon(self) -> None:
        """Make ready for the next step, also after one that was broken off."""
        self._schedule.begin()
        self._weights.forget()
        self._owed.clear()
