"""The gradients of a program, computed by one process, and their comparison with those that ranks found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from averager_changes import CHANGES, HARMLESS
from averager_models import Worker
from averager_programs import Case, Pass, Step

__all__ = ["Record", "difference", "expected", "recorded", "recorded_model", "short"]

_TOLERANCES = {"float64": 1e-10, "float32": 1e-5}


@dataclass(frozen=True)
class Record:
    """Tensors of one rank after one pass.

    Attributes:
        names: "p.grad of ..." with its layout, "buffer ...", or "what a hook ... saw", for each tensor.
        values: The numbers of all tensors, in this order.
        lengths: The number of elements of each.
        marks: What holds beside the numbers: which gradients have the bits of before, or are the user's tensors. One
            process finds what must hold, ranks what does.
        alike: The names of the tensors whose bits are the same on all ranks, as one process finds.
    """

    names: tuple[str, ...]
    values: torch.Tensor
    lengths: tuple[int, ...]
    marks: frozenset[str]
    alike: frozenset[str]

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """The numbers of each tensor."""
        return dict(zip(self.names, self.values.split(self.lengths), strict=True))


def recorded(worker: Worker, left: Set[str] | None = None, alike: Set[str] = frozenset()) -> Record:
    """A worker's gradients and buffers, and what its hooks saw in the pass.

    Args:
        worker: After the pass.
        left: The parameters whose p.grad the pass leaves as it was; None to look which ones it has left.
        alike: The parameters whose p.grad, and the buffers that, are the same on all ranks.
    """
    grads = {name: p.grad for name, p in worker.parameters.items() if p.grad is not None}
    buffers = dict(worker.model.named_buffers())
    labels = {name: f"p.grad of {name} ({'sparse' if grad.is_sparse else 'dense'})" for name, grad in grads.items()}
    labels |= {name: f"buffer {name}" for name in buffers}
    named = [(labels[name], tensor) for name, tensor in (grads | buffers).items()]
    # A compiled model brings gradients in another order.
    sights = sorted(worker.seen, key=itemgetter(0)) if worker.case.compiled else worker.seen
    named += [(f"what hook {number}, {name}, saw", grad) for number, (name, grad) in enumerate(sights)]
    if worker.scaler is not None:
        named.append(("the scale", torch.tensor([worker.scaler.get_scale()])))
    if left is None:
        left = {name for name, before in worker.before.items() if _same_bits(grads.get(name), before)}
    marks = {f"p.grad of {name} keeps its bits" for name in left & worker.before.keys()}
    marks |= {f"{name or 'the memory beside gradients'} stays the user's" for name in worker.memory.holding()}
    return _record(named, marks, {labels[name] for name in alike & labels.keys()})


def recorded_model(worker: Worker) -> Record:
    """A worker's parameters and buffers, which are the same on all ranks."""
    named = list(worker.model.state_dict().items())
    return _record(named, set(), {name for name, _ in named})


def _record(named: Sequence[tuple[str, torch.Tensor]], marks: Set[str], alike: Set[str]) -> Record:
    flat = [_flat(tensor) for _, tensor in named]
    values = torch.cat(flat) if flat else torch.empty(0, dtype=torch.float64)
    names, lengths = tuple(name for name, _ in named), tuple(len(part) for part in flat)
    return Record(names, values, lengths, frozenset(marks), frozenset(alike))


def _same_bits(grad: torch.Tensor | None, before: torch.Tensor) -> bool:
    return grad is not None and torch.equal(_flat(grad).view(torch.int64), _flat(before).view(torch.int64))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.detach().to_dense()
    if dense.is_complex():
        dense = torch.view_as_real(dense)
    return dense.flatten().to(torch.float64)


Records = list[Record | None]
"""The record of each rank after one pass, or None where it has no data left."""


def expected(case: Case) -> list[Records]:
    """For each pass that succeeds, each rank's record."""
    return _Process(case).run()


class _Process:
    """One process that has the workers of all ranks."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.workers = [Worker(case, rank) for rank in range(case.size)]
        for worker in self.workers:
            worker.hook("late")
            worker.track()
        self.owed = [set[str]() for _ in self.workers]

    def run(self) -> list[Records]:
        records = [record for step, following in self.case.walk() for record in self._step(step, following)]
        last = self.case.steps[-1].ranks
        if self.case.joined and last is not None:
            records.append(self._joined(min(last)))
        change = self.case.change
        if change is not None:
            for rank in change.ranks if change.kind in HARMLESS else ():
                CHANGES[change.kind](self.workers[rank].model)
            records.append(self._averaged(self.case.last, range(self.case.size)))
        return records

    def _step(self, step: Step, following: Pass | None) -> Iterator[Records]:
        ranks = sorted(range(self.case.size) if step.ranks is None else step.ranks)
        workers = [self.workers[rank] for rank in ranks]
        for worker in workers:
            worker.prepare(step)
        for number, one in enumerate(step.passes):
            for worker in workers:
                worker.weigh(step, number)
            if one is not step.passes[-1]:
                yield self._alone(one, ranks)
            elif step.succeeds:
                yield self._averaged(one, ranks, ahead=step.ahead, following=following, reuse=step.reuse)
                for worker in workers:
                    worker.finish(step)

    def _alone(self, one: Pass, ranks: Sequence[int]) -> Records:
        """Make a pass under no_sync."""
        found: Records = [None] * self.case.size
        for rank in ranks:
            worker = self.workers[rank]
            worker.run(one)
            worker.memory.adopt(worker.before)
            self.owed[rank] |= worker.touched
            found[rank] = recorded(worker, worker.parameters.keys() - worker.touched)
        return found

    def _averaged(self, one: Pass, ranks: Sequence[int], **how: Any) -> Records:
        for rank in ranks:
            self.workers[rank].run(one, **how)
        found = {name for group in self.case.groups() for name in self._average(group, ranks)}
        alike = set(found)
        if self.case.options.get("broadcast_buffers"):
            buffers = self.workers[ranks[0]].buffers()
            alike |= buffers.keys()
            for rank in ranks:
                self.workers[rank].load_buffers(buffers)
        # Only the averaged ones are the same on all ranks; what a parameter keeps is the rank's own.
        return [
            recorded(worker, worker.parameters.keys() - found, alike) if rank in ranks else None
            for rank, worker in enumerate(self.workers)
        ]

    def _average(self, group: frozenset[str], ranks: Sequence[int]) -> frozenset[str]:
        """Give all workers the mean of some gradients, or the sum: those that a pass has reached, or that waited."""
        workers = [self.workers[rank] for rank in ranks]
        if self.case.parts and not any(worker.touched & group for worker in workers):
            return frozenset()
        found = frozenset(
            name
            for rank, worker in zip(ranks, workers, strict=True)
            for name in group & (worker.touched | self.owed[rank])
            if worker.parameters[name].requires_grad and worker.parameters[name].grad is not None
        )
        weights = [1.0 if worker.weight is None else worker.weight for worker in workers]
        divisor = 1.0 if self.case.options["average"] == "sum" else sum(weights)
        for name in found:
            _mean([worker.parameters[name] for worker in workers], [weight / divisor for weight in weights])
        for rank, worker in zip(ranks, workers, strict=True):
            self.owed[rank] -= found
            worker.weight = None
        return found

    def _joined(self, source: int) -> Records:
        """End `join`: all ranks get the model of one that has made most steps."""
        model = self.workers[source].model
        for worker in self.workers:
            worker.load_buffers(self.workers[source].buffers())
            with torch.no_grad():
                for parameter, other in zip(worker.parameters.values(), model.parameters(), strict=True):
                    parameter.copy_(other)
        return [recorded_model(worker) for worker in self.workers]


def _mean(parameters: Sequence[torch.Tensor], factors: Sequence[float]) -> None:
    """Make each p.grad the sum of all, times these factors; in its own memory where there is one."""
    grads = [parameter.grad for parameter in parameters]
    mean = torch.zeros_like(parameters[0].detach())
    for grad, factor in zip(grads, factors, strict=True):
        if grad is not None and factor:
            mean += grad.detach().to_dense() * factor
    sparse = all(grad.is_sparse for grad in grads if grad is not None)
    for parameter, own in zip(parameters, grads, strict=True):
        if own is not None and not own.is_sparse:
            # A graph stays that of the rank.
            own.detach().copy_(mean)
        else:
            parameter.grad = mean.to_sparse(1) if sparse else mean.clone()


def difference(case: Case, found: Record, wanted: Record, first: Record) -> str | None:
    """Describe the first difference between two records, or in bits from that of the first rank."""
    if found.names != wanted.names:
        odd = sorted(set(found.names) ^ set(wanted.names)) or "in another order"
        return f"{len(found.names)} tensors in place of {len(wanted.names)}: {odd}"
    tolerance = _TOLERANCES[case.dtype]
    known, others = wanted.parts, first.parts
    for name, one in found.parts.items():
        other = known[name]
        finite = other.isfinite()
        if not torch.equal(one[~finite].nan_to_num(7.0), other[~finite].nan_to_num(7.0)):
            return f"{name} is {short(one)} in place of {short(other)}"
        scale = max(1e-3, other[finite].abs().max().item() if finite.any() else 0.0)
        if not ((one - other)[finite].abs() <= tolerance * scale).all():
            return f"{name} is {short(one)} in place of {short(other)}"
        if name in wanted.alike and not torch.equal(one.view(torch.int64), others[name].view(torch.int64)):
            return f"{name} has other bits than on another rank"
    lacking = sorted(wanted.marks - found.marks)
    return f"what must hold does not: {lacking}" if lacking else None


def short(values: torch.Tensor) -> str:
    """The first numbers of a tensor."""
    flat = _flat(values).tolist()
    return f"{[round(value, 5) for value in flat[:4]]}{'...' if len(flat) > 4 else ''}"
