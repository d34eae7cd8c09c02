"""Hooks on a plain model that average its gradients during `backward()`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from unisono.communicator import Communicator
from unisono.core.notebook import html_table
from unisono.core.work import format_bytes
from unisono.gradients.averaging import AveragerSettings, Averaging
from unisono.gradients.weights import AllRanksDone, Weights, check_average
from unisono.utils.flatten import broadcast_all, in_bytes
from unisono.utils.parameters import named_tensors

if TYPE_CHECKING:
    from unisono.compression.codec import Codec

__all__ = ["GradientAverager"]


class GradientAverager:
    """Hooks that average the gradients of a plain model over all ranks while `backward()` computes them.

    Needs one line before the training loop; the loop, the model and the optimizer remain unchanged. When `backward()`
    returns, each `p.grad` is the mean over all ranks, bitwise identical on all of them. The hooks keep the averager
    alive, so you need not keep a reference. Torch hides such hooks from the garbage collector: an unused model is freed
    only after `remove()`.

    Collective: every rank creates one for the same model, and calls `backward()` the same number of times. Gradients
    are views of the averager's memory: clone a gradient to keep it past the next `backward()`.

    Args:
        model: A module, or its parameters.
        comm: The ranks that average. The averager derives three dedicated communicators from it.
        bucket_cap_mb: Maximum message size in MiB, a trade-off between latency and overlap. By default 25 if messages
            are sent while others fill (`comm.overlaps`) or are compressed, and otherwise unlimited.
        first_bucket_mb: Maximum size of the first message: by default 1 if each rank has a core that can reduce it
            while others fill.
        compression: A codec from `unisono.compression`, its name, or None.
        average: "mean", or "sum" for losses that are already divided by the global batch size. A sum includes
            everything in `p.grad`, so zero the gradients of earlier steps first.
        find_unused_parameters: Whether ranks may lack a gradient that others have: they contribute zeros. Pass the
            module, not its parameters, if a rank may have no gradients at all.
        init_sync: Whether to broadcast rank 0's parameters and buffers now.
        broadcast_buffers: Whether to broadcast rank 0's buffers after each backward pass.
        deterministic: Whether gradients are summed in a fixed order that does not depend on backend, algorithms and
            bucket sizes; see `unisono.init`. For results that do not depend on the number of ranks, see
            `un.gradients.LogicalShards`.

    Raises:
        ValueError: Another averager is attached to the model or part of it, or an argument is out of range.
        TypeError: `model` is a single tensor, or contains something other than tensors.
        MismatchError: Ranks have different models or settings. From `backward()`, on every rank: a rank lacks a
            gradient that others have, without `find_unused_parameters`.
        AbortedError: From `backward()`: another rank's pass failed half-way, or its model changed; or ranks ran the
            passes of several averagers in different orders (detected within a second).
        RuntimeError: From the forward pass, `backward()` or `check()`: a parameter was replaced, swapped or added.
        CommTimeoutError, PeerLostError: From `backward()`: a rank did not join; the error names the parameters.

    A backward pass that raises is undone on its rank: p.grad and the settings of `no_sync` and `weight` are restored.
    If part of the pass had been sent, all ranks drop the pass, and the next one is correct. Passes are matched by
    number: if a rank skips a batch, for example after an exception in forward, its next pass belongs to the other
    ranks' current step. It must also skip that optimizer step; this is not checked, but `un.checkpoint.assert_in_sync`
    compares models.

    If several models each have an averager, all ranks must run the models' passes in the same order, or in one
    `backward()` of a common loss. That finishes the passes in the order in which the averagers were created, after
    sharded models.

    Cost per step: one all_reduce per bucket, with two extra elements per parameter and two per bucket, and one copy of
    each gradient; 1.5 us per parameter for a hook that runs before its gradient is added; a check of all parameters
    before the forward and after the backward pass (0.1 us each). Memory: the buckets, which hold the gradients
    themselves once backward has ended. Source of the buckets: Li et al., "PyTorch Distributed", VLDB 2020.

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
        total = check_average(average)
        self._named = named_tensors(model)
        self._model = model if isinstance(model, torch.nn.Module) else None
        self._weights = Weights(comm, total)
        if deterministic and compression is not None:
            raise ValueError("compressed gradients are not summed in the balanced tree of deterministic=True")
        self._settings = AveragerSettings(
            sizes=(in_bytes(bucket_cap_mb), in_bytes(first_bucket_mb)),
            compression=compression,
            total=total,
            find_unused=find_unused_parameters,
            sync_buffers=broadcast_buffers,
            deterministic=deterministic,
        )
        self._attach(comm, init_sync=init_sync)

    def _attach(self, comm: Communicator, *, init_sync: bool) -> None:
        self._averaging = Averaging(
            self._model, self._named, comm, self._settings, self._weights, init_sync=init_sync, owner=self
        )
        self.rank: int = comm.rank
        self.size: int = comm.size

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which backward passes only add to `p.grad`; the next pass outside averages the total.

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
        before = self._averaging.syncing
        self._averaging.syncing = False
        try:
            yield
        finally:
            # Restore it on the current object, because `move_to` may have replaced it.
            self._averaging.syncing = before

    def weight(self, n_samples: float) -> None:
        """Set the weight of this rank's next gradient. Every rank sets one, before `backward()`.

        The mean becomes sum(weight * gradient) / sum(weight). A gradient accumulated over several passes in `no_sync`
        has a single weight: call this once per step.

        Args:
            n_samples: The weight, such as the number of samples; finite and non-negative.

        Raises:
            ValueError: `n_samples` is negative or not finite, or the averager has average="sum"; from `backward()`,
                the weights of all ranks are 0.
            RuntimeError: A pass in `no_sync` has run since the last call in this step.

        Cost: an additional all_gather of 16 bytes in that step.

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
        if self._weights.in_use and any(p.grad is not None for _, p in self._named):
            raise RuntimeError(
                "weight() was called again before the pass that averages, and all that p.grad holds has one weight. "
                "With no_sync(), call it once a step, with the number of samples of all micro-batches, and divide the "
                "sum of each micro-batch's losses by that number"
            )
        self._weights.set(n_samples)

    @contextmanager
    def join(self) -> Iterator[None]:
        """Return a context for a loop with uneven numbers of steps: `with averager.join():`.

        A rank that has finished keeps taking part, contributing nothing, until all ranks have finished; means are over
        the ranks that still have data. At the end, all ranks have the parameters of a rank that was among the last to
        finish. Collective.

        Cost: an additional all_gather of 16 bytes per step.

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
        before = self._averaging.steps
        weights.joining = weights.uneven = True
        try:
            yield
            weights.here = False
            made = self._averaging.steps - before
            with suppress(AllRanksDone):
                while True:
                    self._averaging.shadow()
            boundaries = self._averaging.boundaries
            counts = weights.comm.all_gather_object((made, *boundaries.counts))
            by_rank = [steps for steps, *_ in counts]
            boundaries.catch_up([count for _, *count in counts])
            tensors = [p for _, p in self._named]
            # Collected only now, because a forward pass may have assigned buffers.
            tensors += [] if self._model is None else self._model.buffers()
            broadcast_all(tensors, weights.comm, by_rank.index(max(by_rank)))
        finally:
            weights.joining = False
            weights.here = True
            weights.forget()

    def check(self) -> None:
        """Raise if a parameter was replaced, swapped or added after the averager was created: it is not averaged.

        The averager checks this before each forward and after each backward pass; call it where neither runs.

        Raises:
            RuntimeError: Names the parameter. The other ranks get an `AbortedError` from their next `backward()`.
        """
        self._averaging.check()

    def abort(self, reason: str) -> None:
        """Abort all running and later calls on all ranks, for example after an error that other ranks don't know about.

        Args:
            reason: Text for the other ranks' `AbortedError`.

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
        self._averaging.comms.abort_all(reason)

    def remove(self) -> None:
        """Remove the hooks, and release the communicators. Gradients remain unchanged. Idempotent.

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
        self._averaging.remove()

    # -- state and ranks ------------------------------------------------------------------------
    @property
    def buckets(self) -> list[list[str]]:
        """The names of the parameters in each message, in message order."""
        buckets = self._averaging.buckets
        return list(map(buckets.names_of, buckets.ordered))

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps made, and the state of the codecs. Differs from rank to rank."""
        codecs = self._codecs()
        states = [codec.state_dict() for _, codec in codecs]
        return {"steps": self._averaging.steps, "buckets": [names for names, _ in codecs], "codecs": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state of the same rank.

        Args:
            state: Result of `state_dict` of an averager with the same model and arguments.

        Raises:
            ValueError: The state belongs to another model, or has codec state for other bucket sizes.
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
        self._averaging.steps = state["steps"]

    def _codecs(self) -> list[tuple[list[str], Codec]]:
        """Codecs that have state, each with the names of its parameters."""
        buckets = self._averaging.buckets
        made = map(buckets.codec_of, buckets.ordered)
        return [(names, codec) for names, codec in zip(self.buckets, made, strict=True) if codec is not None]

    def move_to(self, comm: Communicator) -> None:
        """Switch to the ranks of another communicator, such as the result of `comm.rebuild()`.

        Collective over it; new ranks create their own averager in the meantime. An aborted step is
        discarded. Parameters stay unchanged: make them equal on all ranks (`un.elastic` does).

        Codec state is dropped, because it may come from a step that other ranks never made.

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
        steps = self._averaging.steps
        self._attach(comm, init_sync=False)
        self._averaging.steps = steps

    def __repr__(self) -> str:
        sizes = f"{len(self._named)} parameters in {len(self.buckets)} buckets"
        return f"<GradientAverager of {sizes}, rank {self.rank} of {self.size}>"

    def _repr_html_(self) -> str:
        numbered = enumerate(self._averaging.buckets.ordered)
        rows = {f"bucket {i}": f"{format_bytes(b.memory.nbytes)}: {b.name}" for i, b in numbered}
        return html_table(repr(self)[1:-1], rows)
