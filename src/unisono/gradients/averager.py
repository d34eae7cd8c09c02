"""Hooks on a plain model that average its gradients during `backward()`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from unisono.communicator import Communicator
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

    An averager needs one line before the training loop; the loop, the model and the optimizer remain unchanged. When
    `backward()` returns, each `p.grad` is the mean over all ranks, bitwise identical on all of them. The hooks keep the
    averager alive as long as the model exists, so you need not keep a reference.

    Collective: every rank creates an averager for the same model, and calls `backward()` the same number of times.
    Gradients are views of the averager's memory: clone a gradient to keep it past the next `backward()`.

    Args:
        model: A module, or its parameters.
        comm: Communicator of the ranks whose gradients are averaged. The averager derives three dedicated communicators
            from `comm`.
        bucket_cap_mb: Maximum message size in MiB, a trade-off between latency and overlap. The default is 25 if
            messages are compressed or sent during the backward pass (`comm.overlaps`), and otherwise unlimited.
        first_bucket_mb: Maximum size of the first message in MiB. The default is 1 if each rank has a spare CPU core
            that can reduce the first message during the backward pass.
        compression: A codec from `unisono.compression`, its name, or None.
        average: "mean", or "sum" for losses that are already divided by the global batch size. A sum includes
            everything in `p.grad`, so zero the gradients before each step.
        find_unused_parameters: Whether a rank may lack a gradient that other ranks have; it then contributes zeros.
            Pass the module, not its parameters, if a rank may have no gradients at all.
        init_sync: Whether to broadcast rank 0's parameters and buffers now.
        broadcast_buffers: Whether to broadcast rank 0's buffers after each backward pass.
        deterministic: Whether gradients are summed in a fixed order that does not depend on the backend, the algorithm
            or bucket sizes; see `unisono.init`. For results that do not depend on the number of ranks, see
            `un.gradients.LogicalShards`.

    Raises:
        ValueError: Another averager is attached to the model or part of it, or an argument is out of range.
        TypeError: `model` is a single tensor, or contains something other than tensors.
        MismatchError: Ranks have different models or settings. Also raised by `backward()` on every rank if a rank
            lacks a gradient that other ranks have, and `find_unused_parameters` is False.
        AbortedError: Raised by `backward()`: another rank's backward pass failed half-way, or another rank's model
            changed; or ranks ran the backward passes of several averagers in different orders (detected within a
            second).
        RuntimeError: Raised by the forward pass, `backward()` or `check()`: a parameter was replaced, swapped or added
            after construction.
        CommTimeoutError, PeerLostError: Raised by `backward()`: a rank did not take part in a reduction; the error
            names the parameters concerned.

    If a backward pass raises, its rank restores p.grad and the settings of `no_sync` and `weight`. If a backward pass
    raises after its rank has sent some gradients, all ranks drop the pass; the next pass is correct. The n-th pass of
    every rank belongs to the same step. So if a rank skips a batch, for example after an exception in forward, its next
    pass joins the other ranks' current step. A rank that skips a batch must also skip the batch's optimizer step. A
    missing or extra optimizer step is not detected, but you can compare models with `un.checkpoint.assert_in_sync`.

    If several models each have an averager, all ranks must run the models' backward passes in the same order, or in one
    `backward()` of a common loss. With a common loss, sharded models finish their passes first; then averagers finish
    theirs, in the order of their creation.

    Cost per step: one all_reduce per bucket, with two extra elements per parameter and three per bucket; one copy of
    each gradient; one hook call per parameter (1.5 us), before its gradient is accumulated; and a check of each
    parameter (0.1 us) before the forward and after the backward pass. Memory: the buckets, in which the gradients
    themselves are stored after the backward pass. Source of the bucketing: Li et al., "PyTorch Distributed", VLDB 2020.

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
        """Return a context in which backward passes only add to `p.grad`; the next pass outside it averages the total.

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
            # Read `self._averaging` again, because `move_to` may have replaced the object.
            self._averaging.syncing = before

    def weight(self, n_samples: float) -> None:
        """Set the weight of this rank's next gradient. Every rank must set a weight before `backward()`.

        The mean becomes sum(weight * gradient) / sum(weight). A gradient accumulated over several passes in `no_sync`
        has a single weight: call this method once per step.

        Args:
            n_samples: The weight, such as the number of samples; finite and non-negative.

        Raises:
            ValueError: `n_samples` is negative or not finite, or the averager has average="sum". Also raised by
                `backward()` if the weights of all ranks are 0.
            RuntimeError: A weight was already set in this step, and a backward pass in `no_sync` has run since.

        Cost: an additional all_gather of 16 bytes in each weighted step.

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
        """Return a context for a loop whose number of steps differs between ranks: `with averager.join():`.

        Collective. A rank that leaves the loop keeps taking part in the averaging, without contributing, until all
        ranks have left it; means are taken over the ranks that still have data. At the end, all ranks receive the
        parameters of one of the ranks that took the most steps.

        Cost: an additional all_gather of 16 bytes per step.

        Method: as in torch's `Join` (Yu, "Distributed training with uneven inputs", 2021).

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
            # Collect the buffers only now, because a forward pass may have replaced some.
            tensors += [] if self._model is None else self._model.buffers()
            broadcast_all(tensors, weights.comm, by_rank.index(max(by_rank)))
        finally:
            weights.joining = False
            weights.here = True
            weights.forget()

    def check(self) -> None:
        """Raise if a parameter was replaced, swapped or added after construction, because it would not be averaged.

        The averager checks its parameters by itself before each forward and after each backward pass. Call `check` for
        additional checks.

        Raises:
            RuntimeError: A parameter was replaced, swapped or added; the error names the parameter. On the other ranks,
                the next `backward()` raises `AbortedError`.
        """
        self._averaging.registry.check()

    def abort(self, reason: str) -> None:
        """Abort current and later averaging on all ranks, for example after an error that other ranks don't know about.

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
        """Return the number of steps taken and the state of the codecs, which differs between ranks."""
        codecs = self._codecs()
        states = [codec.state_dict() for _, codec in codecs]
        return {"steps": self._averaging.steps, "buckets": [names for names, _ in codecs], "codecs": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state that was saved on the same rank.

        Args:
            state: Result of `state_dict` of an averager with the same model and arguments.

        Raises:
            ValueError: The state belongs to another model, or its codec state is for other bucket sizes.
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
        """Return each bucket's codec, if it has one, with the names of the bucket's parameters."""
        buckets = self._averaging.buckets
        made = map(buckets.codec_of, buckets.ordered)
        return [(names, codec) for names, codec in zip(self.buckets, made, strict=True) if codec is not None]

    def move_to(self, comm: Communicator) -> None:
        """Switch to the ranks of another communicator, such as the result of `comm.rebuild()`.

        Collective over the new communicator: ranks that join create their averager at the same time, with
        `init_sync=False`. An aborted step is discarded. Parameters are not changed: make them equal on all ranks
        yourself, or use `un.elastic`.

        Codec state is dropped, because it may come from a step that other ranks did not complete.

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
        from unisono.core.notebook import html_table

        numbered = enumerate(self._averaging.buckets.ordered)
        rows = {f"bucket {i}": f"{format_bytes(b.memory.nbytes)}: {b.name}" for i, b in numbered}
        return html_table(repr(self)[1:-1], rows)
