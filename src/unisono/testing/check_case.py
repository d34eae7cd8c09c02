"""Runs a case on a rank and reports the errors in its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import torch

from unisono.communicator import Communicator
from unisono.core.types import Work
from unisono.core.work import ResultWork
from unisono.testing.cases import Case
from unisono.testing.memory_layouts import LINEAR, LaidOutTensor, place

__all__ = ["Report", "check_case", "check_reports"]


@dataclass(frozen=True, slots=True)
class Report:
    """Result of checking a case on one rank.

    Attributes:
        complaints: Descriptions of the errors.
        digest: A hash of the bits of the rank's result.
    """

    complaints: tuple[str, ...]
    digest: str


def check_case(comm: Communicator, case: Case) -> Report:
    """Run the case on this rank, and check the result, the inputs, and the memory around these tensors. Collective.

    Example:
        >>> case = Case("all_reduce", size=2, count=5, layout="every second", algorithm="ring")
        >>> [report.complaints for report in un.launch(check_case, 2, "thread", args=(case,))]
        [(), ()]
    """
    given = case.given()
    what = case.what
    # Collectives that split the first dimension get one-dimensional tensors, so that each row is one element.
    by_rows = what.returns or (what.packed and what.pairwise)
    layout = "every second" if by_rows and case.layout not in LINEAR else case.layout
    inputs = [place(tensor.to(comm.device), layout) for tensor in given[comm.rank]]
    if what.in_place:
        outputs = inputs
    else:
        blanks = (torch.ones(n, dtype=case.dtype, device=comm.device) for n in case.taken_lengths(comm.rank))
        outputs = [place(blank, layout) for blank in blanks]
    sides = _as_argument(outputs, what.gathers, what.packed), _as_argument(inputs, what.scatters, what.packed)
    arguments = what.arguments(*sides, case.op, case.root) | case.splits(comm.rank)
    result = getattr(comm, case.call)(**arguments, algorithm=case.algorithm, async_op=case.async_op)
    if isinstance(result, Work):
        result.wait()
    returned = result.result() if isinstance(result, ResultWork) else result
    found = _returned(returned) if what.returns else [placed.values() for placed in outputs]
    complaints = []
    for index, (expected, tensor) in enumerate(zip(case.expected(comm.rank, given), found, strict=True)):
        complaints += [f"result {index}: {message}" for message in [expected.complaint(tensor)] if message]
    if not what.in_place:
        complaints += _changed(inputs, given[comm.rank])
    for name, group in (("input", inputs), ("result", outputs)):
        complaints += [
            f"memory around {name} {i} has changed" for i, placed in enumerate(group) if placed.guard_bytes()
        ]
    return Report(tuple(f"rank {comm.rank}: {message}" for message in complaints), _digest(found))


def check_reports(case: Case, reports: Sequence[Report]) -> None:
    """Raise `AssertionError` if any rank reports errors, or if results that must be bitwise equal differ."""
    complaints = [message for report in reports for message in report.complaints]
    assert not complaints, f"{case}\n" + "\n".join(complaints)
    if case.what.same_everywhere:
        ends = {report.digest for report in reports}
        assert len(ends) == 1, f"{case}\nranks hold {len(ends)} different results"


def _as_argument(placed: list[LaidOutTensor], many: bool, packed: bool) -> torch.Tensor | list[torch.Tensor] | None:
    """Return one tensor, or a list of one tensor per rank; None if this rank passes no tensor."""
    views = [one.view for one in placed]
    if many and not packed:
        return views or None
    return views[0]


def _returned(result: torch.Tensor | list[torch.Tensor] | None) -> list[torch.Tensor]:
    """Return a call's result as one-dimensional tensors."""
    tensors = [result] if isinstance(result, torch.Tensor) else result or []
    return [tensor.reshape(-1).cpu() for tensor in tensors]


def _changed(inputs: list[LaidOutTensor], given: list[torch.Tensor]) -> list[str]:
    before_and_after = zip(given, inputs, strict=True)
    return [
        f"input {index} has changed"
        for index, (before, after) in enumerate(before_and_after)
        if _digest([before]) != _digest([after.values()])
    ]


def _digest(tensors: list[torch.Tensor]) -> str:
    data = b"".join(bytes(tensor.contiguous().view(torch.uint8).tolist()) for tensor in tensors)
    return sha256(data).hexdigest()
