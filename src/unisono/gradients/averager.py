"""Hooks on a plain model that average its gradients during `backward()`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch

from unisono.communicator import Communicator
from unisono.gradients.averager_passes import AveragerPasses
from unisono.gradients.uneven_inputs import joined

if TYPE_CHECKING:
    from unisono.compression.codec import Codec

__all__ = ["GradientAverager"]


class GradientAverager(AveragerPasses):
    """Averages the gradients of a plain model over all ranks while `backward()` computes them.

    One line before the training loop; the loop, the model and the optimizer stay as they are. When
    `backward()` returns, each `p.grad` is the mean over all ranks, the same bits on each. The hooks keep
    the averager alive, so it need not be kept. Torch hides such hooks from the garbage collector: a model that
    is done with is freed after `remove()`.

    Collective: every rank makes one, of the same model, and calls `backward()` equally often. Gradients
    are views of the averager's memory: whoever wants one past the next `backward()` clones it.

    Args:
        model: A module, or its parameters.
        comm: Whose ranks average. The averager talks over three communicators of its own, made of it.
        bucket_cap_mb: Size of a message in MiB, a compromise of latency and overlap: by default 25 where a message
            travels while others fill (`comm.overlaps`) or is compressed, and no limit elsewhere.
        first_bucket_mb: Of the first: by default 1 if each rank has a core that reduces it while others fill.
        compression: A codec of `unisono.compression`, its name, or None.
        average: "mean", or "sum" for losses that are divided by the global batch already. A sum adds up all that
            `p.grad` holds, so what earlier steps left there is to be set to zero first.
        find_unused_parameters: Whether ranks may lack a gradient that others have: they take part with zeros. Give the
            module, not its parameters, if a rank may lack all.
        init_sync: Whether rank 0's parameters and buffers are given to all ranks now.
        broadcast_buffers: Whether rank 0's buffers are given to all ranks after each backward pass.

    Raises:
        ValueError: Another averager has the model, or a part of it.
        MismatchError: Ranks have different models or settings; or, from `backward()` and on every rank, some
            rank has no gradient that others have, without `find_unused_parameters`.
        AbortedError: From `backward()`: another rank's pass has failed half-way, or its model has changed.
        RuntimeError: From a forward, from `backward()` or from `check()`: a parameter was replaced, swapped or added.
        CommTimeoutError, PeerLostError: From `backward()`: a rank did not come; names the parameters.

    A backward pass that raises is undone on its rank: p.grad, and what `no_sync` and `weight` said, are as before. If a
    part of it had left, all ranks drop the pass, and the next one is right.

    Cost: for each step one all_reduce a bucket, with two words a parameter and two more beside the gradients, and one
    copy of each gradient; 1.5 us a parameter for a hook before its gradient is added; a look at all parameters before
    the forward and after the backward (0.1 us each). Memory: one bucket's worth for each gradient, which is the
    gradient itself once backward is through. The idea of buckets: Li et al., "PyTorch Distributed", VLDB 2020.

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
        find_unused_parameters: bool = False,
        init_sync: bool = True,
        broadcast_buffers: bool = False,
    ) -> None:
        if average not in ("mean", "sum"):
            raise ValueError(f"average must be 'mean' or 'sum', not {average!r}")
        super().__init__(
            *(
                model,
                comm,
                bucket_cap_mb,
                first_bucket_mb,
                compression,
                average == "sum",
                find_unused_parameters,
                broadcast_buffers,
            )
        )
        self._attach(comm, init_sync=init_sync)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside it only add to `p.grad`; the next one outside averages all of it."""
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
        self._weights.say(n_samples)

    def join(self) -> AbstractContextManager[None]:
        """`with averager.join():` around a loop that has fewer steps on some ranks than on others.

        A rank that is through takes part in the others' steps with nothing, until all are through; means
        are over the ranks that still have data. At the end all ranks have the parameters of
        one that was last. Collective. Cost: one more short all_reduce a step.
        """
        tensors = self._parameters if self._model is None else [*self._parameters, *self._model.buffers()]
        return joined(tensors, self._weights, self._shadow, self._steps)

    def check(self) -> None:
        """Raise if a parameter was replaced, swapped or added since the averager was made, so that it is not averaged.

        The averager checks this before each forward of the model and after each backward; call it where neither runs.

        Raises:
            RuntimeError: Names the parameter. The other ranks get an `AbortedError` from their next `backward()`.
        """
        self._registry.check()

    def remove(self) -> None:
        """Take the hooks off, and release the communicators. Gradients stay as they are. Idempotent.

        Raises:
            RuntimeError: A backward pass is running.
        """
        if self._pass.is_open:
            raise RuntimeError("remove() was called inside a backward pass; call it after backward()")
        self._registry.remove()
        self._pass.forget()
        self._reducer.clear()
        self._hook_chunks()
        self._comms.close()

    # -- from step to step ----------------------------------------------------------------------
    @property
    def buckets(self) -> list[list[str]]:
        """The names of the parameters in each message, in the order of messages."""
        return [[self._names[i] for i in bucket.indices] for bucket in self._reducer.buckets]

    def state_dict(self) -> dict[str, Any]:
        """State of the codecs, and the number of steps made. Differs from rank to rank."""
        codecs = self._codecs()
        states = [codec.state_dict() for _, codec in codecs]
        return {"steps": self._steps[-1], "buckets": [names for names, _ in codecs], "codecs": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict` of the same rank, of an averager made alike.

        Raises:
            ValueError: It is of another model, or of buckets of other sizes, and a codec remembers something of them.
        """
        codecs = self._codecs()
        names, saved = [names for names, _ in codecs], state["buckets"]
        if saved != names:
            first = next((pair for pair in zip(saved, names, strict=False) if pair[0] != pair[1]), None)
            ends = [f"{part[0]!r} to {part[-1]!r}" for part in first or ()]
            where = f"; one is {ends[0]} there, and {ends[1]} here" if ends else ""
            raise ValueError(
                f"the state is of {len(saved)} buckets with codecs, and this averager has {len(names)}{where}: it was "
                "made of another model, with other sizes, or with no codec or another one"
            )
        for (_, codec), one in zip(codecs, state["codecs"], strict=True):
            codec.load_state_dict(one)
        self._steps[-1] = state["steps"]

    def _codecs(self) -> list[tuple[list[str], Codec]]:
        """Codecs with a state, each with the names of its parameters."""
        made = [self._reducer.codec_of(bucket) for bucket in self._reducer.buckets]
        return [(names, codec) for names, codec in zip(self.buckets, made, strict=True) if codec is not None]

    def move_to(self, comm: Communicator) -> None:
        """Average over the ranks of another communicator from now on, such as what `comm.rebuild()` gave.

        Collective over it; newcomers make an averager of their own meanwhile. A step that was broken off is
        forgotten. Parameters are left as they are: give all ranks the same ones (`un.elastic` does).

        What a codec remembers stays behind, for it may be of a step that others never made.
        """
        self.remove()
        self._attach(comm, init_sync=False)
