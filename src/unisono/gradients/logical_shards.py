"""Gradients of logical shards of the data, summed in the same balanced binary tree on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from unisono.communicator import Communicator
from unisono.core.tensors import HALVES
from unisono.gradients.parameter_registry import ParameterRegistry
from unisono.gradients.weights import check_average, used_gradients
from unisono.utils.flatten import MIB, plan_buckets
from unisono.utils.parameters import INIT_SYNC, agree_on_parameters, named_tensors, share, share_buffers

__all__ = ["LogicalShards"]

_CAP_BYTES = 25 * MIB

_Node = tuple[int, int]
"""A subtree, as a half-open range of shard numbers."""

_Gradients = list[torch.Tensor | None]


@dataclass(slots=True)
class _Step:
    """This rank's state in one step, from the rank's first shard until the gradients are averaged.

    Attributes:
        before: p.grad of each parameter when the step began.
        sums: The gradient sum of each maximal complete subtree, in which every shard has a gradient.
    """

    before: _Gradients
    sums: dict[_Node, _Gradients] = field(default_factory=dict)


@dataclass(slots=True)
class _Shard:
    """The shard whose context is open.

    Attributes:
        number: The shard's number.
        arrived: Indices of the parameters that have received a gradient in this shard.
    """

    number: int
    arrived: set[int] = field(default_factory=set)


class LogicalShards:
    """Averages of gradients over logical shards of the data, bitwise identical for any number of ranks.

    Provisional: it may change in any minor version, without a deprecation.

    Each step's data is divided into `count` shards, and each rank gets the same number of consecutive shards. A rank
    runs the backward pass of each of its shards in a `shard` context, once per step and in any order. When a rank's
    last shard ends, each `p.grad` is the mean over all shards. Gradients are summed in a balanced binary tree over the
    shards; if a subtree has an odd number of shards, its first half is the longer one. Each addition is rounded in the
    parameter's dtype. So the result depends neither on the number of ranks nor on the backend, provided that each
    shard's own gradient is reproducible: a shard's gradient depends on torch's version, kernels and number of threads,
    and on the batch shape.

    Collective: every rank creates this object for the same model.

    Args:
        model: A module, or its parameters.
        comm: Communicator of the ranks whose gradients are averaged. Sums are sent over a dedicated communicator
            derived from `comm`.
        count: Total number of shards, a multiple of the number of ranks.
        average: "mean", or "sum" for losses that are already divided by the global batch size.
        init_sync: Whether to broadcast rank 0's parameters and buffers now.
        broadcast_buffers: Whether to broadcast rank 0's buffers after each step.

    Attributes:
        local: Range of this rank's shard numbers.
        rank, size: This rank, and the number of ranks.

    Raises:
        ValueError: Another averager is attached to the model or part of it, or an argument is out of range.
        TypeError: `model` is a single tensor, or contains something other than tensors.
        MismatchError: Ranks have different models or settings.
        RuntimeError: Raised by `backward()` outside a `shard` context.

    Cost: per step, one all_reduce of the gradients if the number of ranks is a power of two or equals the number of
    shards; otherwise, one all_gather, in which a rank with s shards sends up to 2 log2(s) partial sums of the
    gradients. Communication does not overlap with the backward pass. Memory: up to log2(s) + 1 copies of the gradients,
    because a subtree's two halves are added as soon as both are complete.

    Example:
        >>> def program(comm):
        ...     model = torch.nn.Linear(3, 1, bias=False)
        ...     torch.nn.init.ones_(model.weight)
        ...     shards = un.gradients.LogicalShards(model, comm, 4)
        ...     for number in shards.local:
        ...         x = torch.randn(5, 3, generator=torch.Generator().manual_seed(number))
        ...         with shards.shard(number):
        ...             model(x).square().mean().backward()
        ...     return model.weight.grad.tolist()
        >>> un.launch(program, 1, "thread")[0] == un.launch(program, 4, "thread")[3]
        True
    """

    def __init__(
        self,
        model: torch.nn.Module | Iterable[torch.Tensor],
        comm: Communicator,
        count: int,
        *,
        average: Literal["mean", "sum"] = "mean",
        init_sync: bool = True,
        broadcast_buffers: bool = False,
    ) -> None:
        self._total = check_average(average)
        self._named = named_tensors(model)
        self._parameters = [parameter for _, parameter in self._named]
        self._model = model if isinstance(model, torch.nn.Module) else None
        self._count = count
        self._sync_buffers = broadcast_buffers
        self._steps = 0
        self._attach(comm, init_sync=init_sync)

    def _attach(self, comm: Communicator, *, init_sync: bool) -> None:
        self._registry = ParameterRegistry(self._model, self._named, self.abort, "LogicalShards")
        buffers = list(self._model.named_buffers()) if self._model is not None and init_sync else []
        settings = {"count": self._count, "average": self._total, "broadcast_buffers": self._sync_buffers}
        agree_on_parameters([*self._named, *buffers], comm, settings, hooked=True)
        # Check `count` only after all ranks have compared their values, so that all ranks raise.
        count = self._count
        if isinstance(count, bool) or not isinstance(count, int) or count < 1 or count % comm.size:
            raise ValueError(f"count must be a positive multiple of the {comm.size} ranks, not {count!r}")
        if init_sync:
            share([*self._named, *buffers], comm, model=self._model, hint=INIT_SYNC)
        each = count // comm.size
        self.local: range = range(comm.rank * each, (comm.rank + 1) * each)
        # If each rank's shards form one subtree, ranks all-reduce the subtrees' sums. If a rank's shards form several
        # subtrees (for example, with three ranks of two shards each), every rank gathers all partial sums.
        self._covers = [_cover(0, count, rank * each, (rank + 1) * each) for rank in range(comm.size)]
        # The step in progress, and its open shard.
        self._step: _Step | None = None
        self._open: _Shard | None = None
        # Deterministic collectives sum in a balanced tree over the ranks, which joins the ranks' subtrees into one tree
        # over all shards.
        self._comm = comm.dup(deterministic=True)
        self._comm.allow_any_thread()
        # Claim and hook the parameters last: if anything above raises, they remain free for another averager.
        self._registry.watch_gradients(self._arrive)

    @property
    def rank(self) -> int:
        """This rank."""
        return self._comm.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._comm.size

    @contextmanager
    def shard(self, number: int) -> Iterator[None]:
        """Return a context for the backward passes of one shard: `with shards.shard(number):`.

        Leaving the context of a rank's last shard in a step is collective, because the gradients are averaged then. If
        the code in the context raises an error, the shard may be run again.

        Args:
            number: A shard number from `local`. The same data must have the same shard number for any number of ranks.

        Raises:
            ValueError: The shard belongs to another rank, or was already run in this step.
            RuntimeError: Another shard is open, a hook has used a gradient before it was averaged, or `check` raises.
            CommError: Averaging failed. On this rank, p.grad is restored to its value before the step. Call `move_to`
                with a new communicator, and run all shards of the step again.
        """
        if self._open is not None:
            raise RuntimeError(f"shard({number}) was called inside shard({self._open.number}); leave that first")
        if isinstance(number, bool) or number not in self.local:
            mine = f"{self.local[0]} to {self.local[-1]}"
            raise ValueError(f"shard {number!r} is not one of this rank, which has shards {mine}")
        step = self._step = self._step or _Step([parameter.grad for parameter in self._parameters])
        if any(low <= number < high for low, high in step.sums):
            raise ValueError(f"shard {number} has a gradient in this step already; each shard has one context a step")
        self._clear()
        shard = self._open = _Shard(number)
        try:
            yield
            # Check inside this `try`, so that an error undoes the shard.
            self.check()
            lost = [name for i, (name, p) in enumerate(self._named) if i in shard.arrived and p.grad is None]
            if lost:
                raise RuntimeError(used_gradients(lost))
            self._add(step, number, [parameter.grad for parameter in self._parameters])
        except BaseException:
            self._clear()
            # If the first shard of a step raises, the whole step is undone. If a later shard raises, p.grad is not
            # restored, because it has no meaning until the step ends.
            if not step.sums:
                self._drop()
            raise
        finally:
            self._open = None
        self._clear()
        if sorted(step.sums) == self._covers[self.rank]:
            # Drop the step first, which restores p.grad: if averaging raises, the step's shards can be run again.
            self._drop()
            self._finish(step)

    def check(self) -> None:
        """Raise if a parameter was replaced, swapped or added after construction, because it would not be averaged.

        `check` also runs at the end of each shard.

        Raises:
            RuntimeError: A parameter was replaced, swapped or added; the error names it. The other ranks raise
                `AbortedError` when they next average gradients.
        """
        self._registry.check()

    def abort(self, reason: str) -> None:
        """Abort current and later averaging on all ranks, for example after an error that other ranks don't know about.

        Args:
            reason: Text for the `AbortedError` of the other ranks.
        """
        self._comm.abort(reason)

    def remove(self) -> None:
        """Remove the hooks, and release the communicator. Idempotent.

        If a step is incomplete, it is discarded, and p.grad is restored to its value before that step. If no step is in
        progress, gradients remain unchanged.
        """
        self._drop()
        self._registry.remove()
        self._comm.close()

    def move_to(self, comm: Communicator) -> None:
        """Switch to the ranks of another communicator, such as the result of `comm.rebuild()`.

        Collective over the new communicator: ranks that join create their object at the same time, with
        `init_sync=False`. If a step is incomplete, it is discarded, and p.grad is restored to its value before that
        step. Parameters are not changed: make them equal on all ranks yourself.

        Args:
            comm: The new communicator; its number of ranks must divide `count`.

        Raises:
            MismatchError: Ranks have different models or settings.
            ValueError: The number of shards is not a multiple of the number of ranks.
        """
        self.remove()
        self._attach(comm, init_sync=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps taken, which is the same on all ranks."""
        return {"steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state that was saved on any rank.

        Args:
            state: Result of `state_dict`.
        """
        self._steps = int(state["steps"])

    def __repr__(self) -> str:
        mine = f"{self.local[0]} to {self.local[-1]} of {self._count}"
        return f"<LogicalShards {mine}, rank {self.rank} of {self.size}>"

    def _arrive(self, index: int, _gradient: torch.Tensor) -> None:
        """Hook on every gradient; raises an error if no shard is open, because the gradient would belong to none."""
        if self._open is None:
            raise RuntimeError(
                "backward() ran outside of a logical shard; put each backward pass into `with shards.shard(number):`"
            )
        self._open.arrived.add(index)

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _drop(self) -> None:
        """Drop the step in progress, if any, and restore p.grad to its value before that step."""
        if self._step is not None:
            for parameter, before in zip(self._parameters, self._step.before, strict=True):
                parameter.grad = before
            self._step = None

    @torch.no_grad()
    def _add(self, step: _Step, number: int, gradients: _Gradients) -> None:
        """Add a shard's gradient, and form the sums of all subtrees that it completes."""
        if not self._total:
            # Divide half-precision gradients first: their sum may overflow, but their mean does not.
            gradients = [g / self._count if g is not None and g.dtype in HALVES else g for g in gradients]
        sums = {**step.sums, (number, number + 1): gradients}
        # Only `sums` refers to the quotients now, so they are freed once they have been added.
        del gradients
        for left, right in _halves(0, self._count, number):
            if left not in sums or right not in sums:
                break
            pairs = zip(sums.pop(left), sums.pop(right), strict=True)
            sums[left[0], right[1]] = [_plus(*pair) for pair in pairs]
        # Change the step last: if memory runs out above, this shard can be repeated.
        step.sums = sums

    @torch.no_grad()
    def _finish(self, step: _Step) -> None:
        """Average the gradients of all shards of all ranks, and add them to p.grad. Collective."""
        averages = self._averages([step.sums.pop(node) for node in self._covers[self.rank]])
        if self._sync_buffers and self._model is not None:
            share_buffers(self._model, self._comm)
        # Change p.grad only after the last message: if a message fails, the shards are run again, and their gradients
        # must not be added twice.
        for i, average in averages.items():
            parameter = self._parameters[i]
            parameter.grad = average if parameter.grad is None else parameter.grad.add_(average)
        self._steps += 1

    def _averages(self, mine: list[_Gradients]) -> dict[int, torch.Tensor]:
        """Return the average gradient of each parameter that any rank has used, given this rank's sums. Collective."""
        # A rank may lack a gradient that another rank has, but all ranks must fill the same buckets. Summing booleans
        # gives their logical or.
        used = torch.tensor(
            [any(sums[i] is not None for sums in mine) for i in range(len(self._parameters))], device=self._comm.device
        )
        self._comm.all_reduce(used)
        indices = [i for i, is_used in enumerate(used.tolist()) if is_used]
        averages: dict[int, torch.Tensor] = {}
        for bucket in plan_buckets(self._parameters, indices, _CAP_BYTES):
            members = [self._parameters[i] for i in bucket]
            partial = [torch.cat([_flat(sums[i], self._parameters[i]) for i in bucket]) for sums in mine]
            result = self._reduced(partial)
            # Half-precision gradients were already divided in `_add`; divide all other gradients only now, so that the
            # division rounds only once.
            if not self._total and result.dtype not in HALVES:
                result /= self._count
            for i, parameter, part in zip(bucket, members, result.split([p.numel() for p in members]), strict=True):
                # Like torch's own gradients, an average has the parameter's strides.
                averages[i] = torch.empty_like(parameter).copy_(part.view(parameter.shape))
                # Drop a bucket's sums once their average exists, so that sums and averages together need no more memory
                # than the sums alone.
                for sums in mine:
                    sums[i] = None
        return averages

    def _reduced(self, partial: list[torch.Tensor]) -> torch.Tensor:
        """Return the sum over all shards, given this rank's partial sums. Collective."""
        if all(len(cover) == 1 for cover in self._covers):
            self._comm.all_reduce(partial[0])
            return partial[0]
        numel = partial[0].numel()
        gathered = [partial[0].new_empty(numel * len(cover)) for cover in self._covers]
        # All ranks add the same partial sums in the same order, and so get the same bits.
        self._comm.all_gather(gathered, torch.cat(partial))
        known = {
            node: part
            for cover, parts in zip(self._covers, gathered, strict=True)
            for node, part in zip(cover, parts.split(numel), strict=True)
        }
        return _sum_of(known, 0, self._count)


def _middle(low: int, high: int) -> int:
    """Return the first shard of a subtree's second half; with an odd number of shards, the first half is longer."""
    return low + (high - low + 1) // 2


def _cover(low: int, high: int, start: int, stop: int) -> list[_Node]:
    """Return the largest subtrees that together make up a range of consecutive shards."""
    if stop <= low or high <= start:
        return []
    if start <= low and high <= stop:
        return [(low, high)]
    middle = _middle(low, high)
    return _cover(low, middle, start, stop) + _cover(middle, high, start, stop)


def _halves(low: int, high: int, number: int) -> Iterator[tuple[_Node, _Node]]:
    """Yield both halves of each subtree of a range that contains a shard, beginning with the smallest subtree."""
    if high - low > 1:
        middle = _middle(low, high)
        yield from _halves(low, middle, number) if number < middle else _halves(middle, high, number)
        yield (low, middle), (middle, high)


def _sum_of(known: Mapping[_Node, torch.Tensor], low: int, high: int) -> torch.Tensor:
    """Return the sum over a subtree, given the sums of subtrees that together cover it."""
    if (low, high) in known:
        return known[low, high]
    middle = _middle(low, high)
    return _sum_of(known, low, middle) + _sum_of(known, middle, high)


def _plus(some: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if some is None or other is None:
        return other if some is None else some
    return some + other


def _flat(gradient: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    return parameter.new_zeros(parameter.numel()) if gradient is None else gradient.reshape(-1)
