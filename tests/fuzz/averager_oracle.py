"""The gradients of a program, computed by one process, and their comparison with those that ranks found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch
from averager_changes import CHANGES, HARMLESS
from averager_models import Worker
from averager_programs import Case, Pass

__all__ = ["Record", "difference", "expected", "recorded", "short"]

_TOLERANCES = {"float64": 1e-10, "float32": 1e-5}


@dataclass(frozen=True)
class Record:
    """Tensors of one rank after one pass.

    Attributes:
        names: "p.grad of ..." with its layout, or "what a hook saw of ...", for each tensor.
        values: The numbers of all tensors, in this order.
        lengths: The number of elements of each.
        averaged: Whether the gradients are the same on all ranks.
    """

    names: tuple[str, ...]
    values: torch.Tensor
    lengths: tuple[int, ...]
    averaged: bool

    @property
    def bits(self) -> torch.Tensor:
        """The bits of the gradients."""
        count = sum(length for name, length in zip(self.names, self.lengths, strict=True) if name.startswith("p.grad"))
        return self.values[:count].view(torch.int64)


def recorded(worker: Worker, *, averaged: bool) -> Record:
    """A worker's gradients, and what its hooks saw in the pass."""
    grads = [(name, p.grad.detach()) for name, p in worker.parameters.items() if p.grad is not None]
    named = [(f"p.grad of {name} ({'sparse' if grad.is_sparse else 'dense'})", grad) for name, grad in grads]
    # A compiled model brings gradients in another order.
    sights = sorted(worker.seen, key=itemgetter(0)) if worker.case.compiled else worker.seen
    named += [(f"what a hook saw of {name}", grad) for name, grad in sights]
    if worker.scaler is not None:
        named.append(("the scale", torch.tensor([worker.scaler.get_scale()])))
    flat = [_flat(tensor) for _, tensor in named]
    return Record(
        tuple(name for name, _ in named),
        torch.cat(flat) if flat else torch.empty(0, dtype=torch.float64),
        tuple(len(part) for part in flat),
        averaged,
    )


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.detach().to_dense()
    if dense.is_complex():
        dense = torch.view_as_real(dense)
    return dense.flatten().to(torch.float64)


def expected(case: Case) -> list[list[Record]]:
    """For each pass that succeeds, each rank's record."""
    workers = [Worker(case, rank) for rank in range(case.size)]
    for worker in workers:
        worker.hook("late")
    records = []
    for step, _ in case.walk():
        for worker in workers:
            worker.prepare(step)
        for one in step.passes[:-1]:
            for worker in workers:
                worker.run(one)
            records.append([recorded(worker, averaged=False) for worker in workers])
        if step.succeeds:
            records.append(_averaged(workers, step.passes[-1], retain=step.retain, reuse=step.reuse))
            for worker in workers:
                worker.finish(step)
    if case.change is not None:
        for rank in case.change.ranks if case.change.kind in HARMLESS else ():
            CHANGES[case.change.kind](workers[rank].model)
        records.append(_averaged(workers, case.last))
    return records


def _averaged(workers: Sequence[Worker], one: Pass, **how: bool) -> list[Record]:
    """Make an averaged pass."""
    for worker in workers:
        worker.run(one, **how)
    _average(workers, total=workers[0].case.options["average"] == "sum")
    return [recorded(worker, averaged=True) for worker in workers]


def _average(workers: Sequence[Worker], *, total: bool) -> None:
    """Give all workers the mean of their gradients, or the sum."""
    weights = [1.0 if worker.weight is None else worker.weight for worker in workers]
    divisor = 1.0 if total else sum(weights)
    for name, parameter in workers[0].parameters.items():
        grads = [worker.parameters[name].grad for worker in workers]
        present = [(grad, weight) for grad, weight in zip(grads, weights, strict=True) if grad is not None]
        if not parameter.requires_grad or not present:
            continue
        mean = torch.zeros_like(parameter.detach())
        for grad, weight in present:
            if weight:
                mean += grad.detach().to_dense() * (weight / divisor)
        sparse = all(grad.is_sparse for grad, _ in present)
        for worker, own in zip(workers, grads, strict=True):
            if own is not None and own.requires_grad:
                # Its graph stays that of the rank.
                own.detach().copy_(mean)
            else:
                worker.parameters[name].grad = mean.to_sparse(1) if sparse else mean.clone()
    for worker in workers:
        worker.weight = None


def difference(case: Case, found: Record, wanted: Record) -> str | None:
    """Describe the first difference between two records."""
    if found.names != wanted.names:
        odd = sorted(set(found.names) ^ set(wanted.names)) or "in another order"
        return f"{len(found.names)} tensors in place of {len(wanted.names)}: {odd}"
    tolerance = _TOLERANCES[case.dtype]
    for name, one, other in zip(
        found.names, found.values.split(found.lengths), wanted.values.split(wanted.lengths), strict=True
    ):
        finite = other.isfinite()
        if not torch.equal(one[~finite].nan_to_num(7.0), other[~finite].nan_to_num(7.0)):
            return f"{name} is {short(one)} in place of {short(other)}"
        scale = max(1e-3, other[finite].abs().max().item() if finite.any() else 0.0)
        if not ((one - other)[finite].abs() <= tolerance * scale).all():
            return f"{name} is {short(one)} in place of {short(other)}"
    return None


def short(values: torch.Tensor) -> str:
    """The first numbers of a tensor."""
    flat = _flat(values).tolist()
    return f"{[round(value, 5) for value in flat[:4]]}{'...' if len(flat) > 4 else ''}"
