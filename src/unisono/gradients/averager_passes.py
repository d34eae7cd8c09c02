"""Inside of `GradientAverager`: hooks, backward passes and steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from unisono.communicator import Communicator
from unisono.core.notebook import html_table
from unisono.core.work import format_bytes
from unisono.errors import AbortedError
from unisono.gradients.averager_comms import AveragerComms
from unisono.gradients.bucket import Bucket
from unisono.gradients.logical_shards import LogicalShards
from unisono.gradients.parameter_registry import ParameterRegistry
from unisono.gradients.reducer import Reducer, codec_for
from unisono.gradients.sparse import average_sparse, sparse_parameters
from unisono.gradients.weights import ErrorContext, Weights, check_skipped, used_gradients
from unisono.utils.backward_pass import BackwardPass, SavedGradients, adds_to_leaves, current_pass, watch_outputs
from unisono.utils.bucket_plan import agree_on_parameters, bucket_sizes, in_bytes, named_parameters
from unisono.utils.flatten import broadcast_all, share

if TYPE_CHECKING:
    from unisono.compression.codec import Codec

__all__ = ["AveragerPasses"]

_post_accumulate_hooks = attrgetter("_post_accumulate_grad_hooks")
_version = attrgetter("_version")


class AveragerPasses:
    """Base of `GradientAverager`, which describes the arguments: what runs in hooks."""

    def __init__(
        self,
        model: torch.nn.Module | Iterable[torch.Tensor],
        comm: Communicator,
        sizes: tuple[float | None, float | None],
        compression: str | Codec | Callable[[], Codec] | None,
        sums: tuple[bool, bool, int | None],
        find_unused_parameters: bool,
        broadcast_buffers: bool,
    ) -> None:
        total, deterministic, shards = sums
        self._named = named_parameters(model)
        self._names, self._parameters = [n for n, _ in self._named], [p for _, p in self._named]
        self._model = model if isinstance(model, torch.nn.Module) else None
        self._sizes = in_bytes(sizes[0]), in_bytes(sizes[1])
        self._find_unused, self._sync_buffers, self._compression = (
            find_unused_parameters,
            broadcast_buffers,
            compression,
        )
        self._weights, self._total, self._steps = Weights(comm, total), total, [0]
        self._deterministic, self._shard_count = deterministic or shards is not None, shards
        if self._deterministic and compression is not None:
            raise ValueError("compressed gradients are not summed in the balanced tree of deterministic=True")

    def _attach(self, comm: Communicator, *, init_sync: bool) -> None:
        self._registry = ParameterRegistry(self._model, self._named, self._report)
        codec = codec_for(self._compression)
        how_summed = self._total, self._deterministic, self._shard_count
        settings = (*self._sizes, *how_summed, self._find_unused, self._sync_buffers, repr(codec))
        buffers = list(self._model.named_buffers()) if self._model is not None and init_sync else []
        agree_on_parameters([*self._named, *buffers], comm, settings, hooked=True)
        if init_sync:
            share([*self._named, *buffers], comm)
        self.rank, self.size = comm.rank, comm.size
        self._comms = AveragerComms(comm, deterministic=self._deterministic)
        data = self._comms.data
        how = {"background": data.overlaps and codec is None, "compressed": codec is not None}
        sizes = bucket_sizes(self._sizes, self._parameters, comm, **how)
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
        self._pass = BackwardPass(self._begin, self._end, self._fail, one_thread=on_cpu)
        self._accumulated: set[int] = set()
        self._versions: list[int] | None = None
        self._syncing, self._failed, self._reconnected = True, False, False
        # If buckets are sent while others fill, the first step of all ranks records the order of gradients.
        self._seen: list[torch.Tensor] | None = [] if self._reducer.background else None
        self._frozen = [i for i, p in enumerate(self._parameters) if not p.requires_grad]
        self._shards: LogicalShards | None = None
        if self._shard_count is not None:
            self._shards = LogicalShards(self._named, self._comms.data, self._shard_count, total=self._total)
            self._registry.watch_gradients(self._shards.arrive)
        elif self.size > 1:
            self._install()
        self._comms.ready()
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
        self._comms.abort(problem)

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
        if parameter.grad is None:
            self._taken.add(index)

    def _count_hooks(self) -> int:
        return sum(map(len, filter(None, map(_post_accumulate_hooks, self._parameters))))

    def _hooked(self) -> set[int]:
        """Return the parameters that have hooks of the caller's: these see what they would see without an averager."""
        own = self._own_hooks
        hooks = enumerate(map(_post_accumulate_hooks, self._parameters))
        return {index for index, table in hooks if table and len(table) > own[index]}

    def _on_chunk_ready(self, bucket: Bucket, slots: Sequence[int], _parameter: torch.Tensor) -> None:
        """A hook of the last parameter of a chunk: its gradient has been added to `p.grad`."""
        if self._pass.is_open and self._syncing and not bucket.started:
            bucket.take(slots)
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
        others = [i for i in self._pass.arrived - arrived if self._parameters[i].requires_grad]
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
        self._reducer.finish(arrived, asks=(bool(thawed), bool(problem)))
        asks_thawed, asks_used = self._reducer.asked
        # Without a bucket there was no message to carry the requests.
        if asks_used or (problem and not self._reducer.where):
            self._refuse_used(problem)
        if self._reducer.uneven and not self._find_unused:
            self._look_at(self._reducer.buckets)
        if asks_thawed or (thawed and not self._reducer.where):
            self._on_unfrozen(thawed, arrived)
        if self._sparse:
            self._average_sparse(arrived)
        if self._sync_buffers:
            self._share_buffers()
        if self._weights.here:
            self._reducer.assign()
        else:
            self._saved.restore()
        self._begin_step()

    def _begin_step(self) -> None:
        if self._accumulated:
            # What was accumulated before a parameter was frozen is averaged once it no longer is.
            waiting = {i for i in self._accumulated if not self._parameters[i].requires_grad}
            self._accumulated = {i for i in waiting if not self._reducer.has_mean(i)}
        self._reducer.begin()
        self._saved.clear()
        self._steps[-1] += self._weights.here
        all_took_part = self._weights.active == self.size
        if self._weights.uneven:
            self._weights.forget()
        if self._seen is not None and all_took_part:
            self._learn_order(self._seen)

    def _learn_order(self, seen: Sequence[torch.Tensor]) -> None:
        """Recreate the buckets, in the order in which rank 0's gradients arrived."""
        self._seen, numbers = None, {id(parameter): index for index, parameter in enumerate(self._parameters)}
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
        within = self._reducer.holding(grad)
        bucket, slot = self._reducer.where.get(index, (None, 0))
        if within is None or (within is bucket and bucket.is_place(slot, grad)):
            return within is not None
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
    def _average_sparse(self, arrived: set[int]) -> None:
        lacking = [self._names[i] for i in self._sparse if i not in arrived and self._weights.here]
        sparse = [self._named[i] for i in self._sparse]
        here = [i in arrived and self._weights.here for i in self._sparse]
        average_sparse(sparse, self._comms.control, self._weights, here, None if self._find_unused else lacking)

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

    def _share_buffers(self) -> None:
        """Broadcast the buffers of the first rank that has data.

        A buffer that the graph of another forward holds is replaced, so that its backward pass finds the old values.
        """
        if self._model is None:
            return
        replaced: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for module in self._model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer._use_count() > 1:  # type: ignore[attr-defined]
                    replaced.setdefault(id(buffer), (buffer, buffer.clone()))
                if id(buffer) in replaced:
                    module._buffers[name] = replaced[id(buffer)][1]
        broadcast_all(self._model.buffers(), self._comms.control, self._weights.source)

    def _shadow(self) -> None:
        """Join a step of the ranks that still have data: contribute nothing, and leave p.grad as it is."""
        self._accumulated.clear()
        try:
            self._begin()
            self._end()
        except BaseException:
            self._fail()
            raise

    def _look_at(self, buckets: Sequence[Bucket]) -> None:
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
