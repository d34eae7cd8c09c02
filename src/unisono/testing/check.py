"""Carry out a case on a rank, and say what is wrong with what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch

from unisono.communicator import Communicator
from unisono.testing.cases import IN_PLACE, Case
from unisono.testing.placed import LINEAR, Placed, place

__all__ = ["Report", "check_case", "check_reports"]

_SAME = frozenset({"all_reduce", "broadcast", "all_gather", "all_gather_single"})
"""After these, all ranks hold the same bits."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank found.

    Attributes:
        complaints: What is wrong, in words.
        digest: A hash of the bits that the rank then holds.
    """

    complaints: tuple[str, ...]
    digest: str


def check_case(comm: Communicator, case: Case) -> Report:
    """Make the call on this rank; compare the result, the inputs and the memory around both. Collective.

    Example:
        >>> case = Case("all_reduce", size=2, count=5, layout="every second", algorithm="ring")
        >>> [report.complaints for report in un.launch(check_case, 2, "thread", args=(case,))]
        [(), ()]
    """
    given = case.given()
    # Rows are split along the first dimension; here there is one, and each row is one element.
    layout = case.layout if case.call != "all_to_all_single" or case.layout in LINEAR else "every second"
    inputs = [place(tensor.to(comm.device), layout) for tensor in given[comm.rank]]
    if case.call in IN_PLACE:
        outputs = inputs
    else:
        blanks = (torch.ones(n, dtype=case.dtype, device=comm.device) for n in case.taken_lengths(comm.rank))
        outputs = [place(blank, layout) for blank in blanks]
    how = {"algorithm": case.algorithm, "async_op": case.async_op}
    work = _CALL[case.call](comm, case, [p.view for p in inputs], [p.view for p in outputs], how)
    if work is not None:
        work.wait()
    found = [placed.values() for placed in outputs]
    complaints = []
    for index, (expected, tensor) in enumerate(zip(case.expected(comm.rank, given), found, strict=True)):
        complaints += [f"result {index}: {said}" for said in [expected.complaint(tensor)] if said]
    if case.call not in IN_PLACE:
        complaints += _changed(inputs, given[comm.rank])
    for name, group in (("input", inputs), ("result", outputs)):
        complaints += [f"memory around {name} {i} has changed" for i, placed in enumerate(group) if placed.spilled()]
    return Report(tuple(f"rank {comm.rank}: {said}" for said in complaints), _digest(found))


def check_reports(case: Case, reports: Sequence[Report]) -> None:
    """Raise `AssertionError` if any rank has complained, or if bits differ that must be equal."""
    complaints = [said for report in reports for said in report.complaints]
    assert not complaints, f"{case}\n" + "\n".join(complaints)
    if case.call in _SAME:
        ends = {report.digest for report in reports}
        assert len(ends) == 1, f"{case}\nranks hold {len(ends)} different results"


def _changed(inputs: list[Placed], given: list[torch.Tensor]) -> list[str]:
    before_and_after = zip(given, inputs, strict=True)
    return [
        f"input {index} has changed"
        for index, (before, after) in enumerate(before_and_after)
        if _digest([before]) != _digest([after.values()])
    ]


def _digest(tensors: list[torch.Tensor]) -> str:
    data = b"".join(bytes(tensor.contiguous().view(torch.uint8).tolist()) for tensor in tensors)
    return sha256(data).hexdigest()


_Tensors = list[torch.Tensor]
_How = dict[str, Any]


def _at_root(comm: Communicator, case: Case, tensors: _Tensors) -> _Tensors | None:
    return tensors if comm.rank == case.root else None


_CALL: dict[str, Callable[[Communicator, Case, _Tensors, _Tensors, _How], Any]] = {
    "all_gather": lambda comm, case, given, got, how: comm.all_gather(got, given[0], **how),
    "all_gather_single": lambda comm, case, given, got, how: comm.all_gather_single(got[0], given[0], **how),
    "all_reduce": lambda comm, case, given, got, how: comm.all_reduce(got[0], case.op, **how),
    "all_to_all": lambda comm, case, given, got, how: comm.all_to_all(got, given, **how),
    "all_to_all_single": lambda comm, case, given, got, how: comm.all_to_all_single(
        got[0], given[0], *case.splits(comm.rank), **how
    ),
    "broadcast": lambda comm, case, given, got, how: comm.broadcast(got[0], case.root, **how),
    "gather": lambda comm, case, given, got, how: comm.gather(given[0], _at_root(comm, case, got), case.root, **how),
    "reduce": lambda comm, case, given, got, how: comm.reduce(got[0], case.root, case.op, **how),
    "reduce_scatter": lambda comm, case, given, got, how: comm.reduce_scatter(got[0], given, case.op, **how),
    "reduce_scatter_single": lambda comm, case, given, got, how: comm.reduce_scatter_single(
        got[0], given[0], case.op, **how
    ),
    "scatter": lambda comm, case, given, got, how: comm.scatter(got[0], _at_root(comm, case, given), case.root, **how),
}
