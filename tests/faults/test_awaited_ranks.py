"""Ranks that a collective waits for, by the states of all ranks; ranks in the same call are not blamed."""

from __future__ import annotations

from typing import Any, cast

import pytest
from insides import engine_of

from unisono.core.control import ControlPlane
from unisono.core.failure import Cause
from unisono.core.flight_recorder import Activity, Record
from unisono.core.group import Group
from unisono.diagnostics.hang_report import hang_report
from unisono.errors import CommTimeoutError
from unisono.testing import run_ranks


class Told:
    """A control plane to which ranks have said what they are doing; None says nothing."""

    def __init__(self, *calls: tuple[int, bool] | None) -> None:
        self.group = Group.world(0, len(calls))
        self._calls = calls

    def query(self, group: Group, patience: float) -> dict[tuple[str, int], Any]:
        return {(group.name, rank): call and self._one(rank, *call) for rank, call in enumerate(self._calls)}

    def _one(self, rank: int, number: int, inside: bool) -> dict[str, Any]:
        """State that a rank reports inside a quick call, which counts only when it is over, or after one."""
        activity = Activity(Group.world(rank, len(self._calls)))
        call: Record = ("all_reduce", number, "sum", "train.py:7")
        if inside:
            activity.calls, activity.now, activity.inside = number - 1, call, True
        else:
            activity.note(*call)
        return {"pid": 1, "groups": [activity.to_dict()], "site": "", "function": None, "stack": [], "callers": []}


@pytest.mark.parametrize(
    ("calls", "missing", "verdict"),
    [
        ([(7, True), (6, False), (7, True)], (1,), "rank 1 has not arrived"),
        ([(7, True), None, (7, True), (7, True)], (1,), "rank 1 does not answer"),
        ([(7, True), None, (6, True)], (1,), "rank 1 does not answer"),
        ([(7, True), None, (6, False)], (2,), "rank 2 has not arrived"),
        ([(7, True), (6, True), (7, True)], (1,), "rank 1 has not arrived"),
        ([(7, True), (6, False), (5, False), (7, True)], (1, 2), "ranks 1, 2 have not arrived"),
        ([(7, True), (7, True), (8, True), (7, False)], (), ""),
        ([(6, False), (7, True)], (), ""),
    ],
)
def test_awaited_ranks_of_a_collective(calls: list[Any], missing: tuple[int, ...], verdict: str) -> None:
    told = Told(*calls)
    hang = hang_report(cast("ControlPlane", told), told.group)
    assert (hang.missing, hang.deadlock) == (missing, False)
    assert hang.verdict.startswith(verdict)
    assert bool(hang.verdict) == bool(verdict)


def _gives_up_second(comm: Any) -> str | None:
    """The later rank gets the verdict of the first one, which asked before the blamed rank could continue."""
    comm.barrier()
    if comm.rank == 1:
        return None
    engine = engine_of(comm)
    engine.control.report_failure(
        engine.group, Cause("CommTimeoutError", 1, "rank 2 gave up: waited\n  rank 1 is at train.py:7")
    )
    return str(engine.failures.report(CommTimeoutError("waited 2.0 s"), "all_reduce"))


def test_later_timeout_reports_the_first_verdict() -> None:
    told = run_ranks(_gives_up_second, 2, "thread")[0]
    assert told is not None
    first, *others = told.splitlines()
    assert first.endswith("waited 2.0 s")
    assert others == ["  rank 1 is at train.py:7"]
