"""Traces: calls and messages of each rank with their times, in a format of common viewers."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

import unisono as un
from unisono.core.tracing import TraceEvent
from unisono.core.transport import Transport
from unisono.testing import run_ranks
from unisono.wrappers.trace import Traced


class Sink:
    """Collects events of all ranks."""

    def __init__(self) -> None:
        self.events: list[TraceEvent] = []
        self._lock = threading.Lock()

    def __call__(self, event: TraceEvent) -> None:
        with self._lock:
            self.events.append(event)

    def wrap(self, inner: Transport) -> Transport:
        return Traced(inner, self)

    def of(self, rank: int, kind: str) -> list[TraceEvent]:
        return [event for event in self.events if (event.rank, event.kind) == (rank, kind)]


def test_messages_are_logged_with_peer_tag_and_bytes() -> None:
    sink = Sink()

    def program(comm: un.Communicator) -> None:
        if comm.rank == 0:
            comm.send(torch.ones(3, dtype=torch.float64), 1, tag=5)
        else:
            comm.recv(torch.ones(3, dtype=torch.float64), 0, tag=5)

    run_ranks(program, 2, wrap=sink.wrap)
    (sent,), (received,) = sink.of(0, "send"), sink.of(1, "recv")
    assert (sent.name, sent.nbytes, sent.group) == ("send to 1", 24, "world")
    assert (sent.detail["peer"], sent.detail["tag"]) == (1, 5)
    assert (received.name, received.nbytes, received.detail["peer"]) == ("recv from 0", 24, 0)
    assert sent.detail["flow"] == received.detail["flow"]
    assert sent.start_s <= sent.end_s
    assert not sink.of(0, "recv")


def test_work_is_logged_once() -> None:
    sink = Sink()

    def program(comm: un.Communicator) -> None:
        work = comm.isend(torch.ones(1), 1) if comm.rank == 0 else comm.irecv(torch.ones(1), 0)
        future = work.get_future()
        work.wait()
        work.wait()
        future.wait()
        assert work.is_completed()

    run_ranks(program, 2, wrap=sink.wrap)
    assert len(sink.events) == 2, sink.events


def test_collectives_are_logged_with_number_algorithm_and_line() -> None:
    sink = Sink()

    def program(comm: un.Communicator) -> None:
        comm.barrier()
        comm.all_reduce(torch.ones(8), algorithm="ring")

    run_ranks(program, 2, wrap=sink.wrap)
    called = sink.of(0, "begin")
    assert [event.name for event in called] == ["barrier", "all_reduce"]
    assert (called[1].detail["call"], called[1].detail["algorithm"]) == (2, "ring")
    assert called[1].detail["site"].startswith("test_trace.py:")
    # A ring among two sends each half once to be reduced, and once as a result.
    assert sum(event.nbytes for event in sink.of(0, "send") if event.nbytes > 1) == 32


def test_wrapper_applies_to_subgroups() -> None:
    sink = Sink()
    run_ranks(lambda comm: comm.split(comm.rank % 2).all_reduce(torch.ones(4)), 4, wrap=sink.wrap)
    groups = {event.group for event in sink.events if event.kind == "send"}
    assert len(groups) == 2
    assert all(group.startswith("world/") for group in groups), groups


def test_native_collectives_pass_through() -> None:
    sink = Sink()
    with un.init("gloo", wrap=sink.wrap) as comm:
        comm.all_reduce(torch.ones(4))
    assert [event.kind for event in sink.events] == ["begin", "collective"]
    assert sink.events[1].nbytes == 16


def test_trace_has_the_format_of_viewers(tmp_path: Path) -> None:
    def program(comm: un.Communicator) -> list[str]:
        comm.barrier()
        with un.trace(tmp_path / f"{comm.rank}.json") as events:
            comm.all_reduce(torch.ones(1000))
            comm.sendrecv(torch.ones(1), 1 - comm.rank, torch.ones(1), 1 - comm.rank)
        comm.barrier()
        return [event.name for event in events]

    for rank, names in enumerate(run_ranks(program, 2)):
        assert names[0] == "all_reduce"
        assert {f"send to {1 - rank}", f"recv from {1 - rank}"} <= set(names)
        assert "barrier" not in names
        written = json.loads((tmp_path / f"{rank}.json").read_text())["traceEvents"]
        spans = [event for event in written if event["ph"] == "X"]
        assert sorted(event["name"].removeprefix("begin ") for event in spans) == sorted(names)
        assert all(event["pid"] == rank and event["dur"] >= 0 for event in spans)
        assert all(event["ts"] > 0 and event["args"]["nbytes"] >= 0 for event in spans)


def test_trace_covers_asynchronous_calls(tmp_path: Path) -> None:
    def program(comm: un.Communicator) -> int:
        with un.trace(tmp_path / f"{comm.rank}.json") as events:
            comm.all_reduce(torch.ones(10), async_op=True).wait()
        return sum(event.kind == "send" for event in events)

    assert all(sends > 0 for sends in run_ranks(program, 2))


def test_trace_is_written_if_the_program_fails(tmp_path: Path) -> None:
    path = tmp_path / "run.json"

    def program(comm: un.Communicator) -> None:
        with un.trace(path):
            comm.barrier()
            raise KeyError("mistake")

    with pytest.raises(KeyError):
        run_ranks(program, 1)
    written = json.loads(path.read_text())["traceEvents"]
    assert "barrier" in [event["name"] for event in written if event["ph"] == "X"]


@pytest.mark.parametrize("size", [1, 2])
def test_unwritable_trace_hides_no_error_of_the_program(size: int) -> None:
    def program(comm: un.Communicator) -> None:
        with un.trace("/nonexistent/run.json", None if size == 1 else comm):
            raise KeyError("mistake")

    with pytest.raises(KeyError, match="mistake") as caught:
        run_ranks(program, size)
    assert any("trace could not be written" in note for note in caught.value.__notes__)


def test_unwritable_trace_is_an_error_that_names_the_file() -> None:
    with pytest.raises(FileNotFoundError, match=r"/nonexistent/run\.json"), un.trace("/nonexistent/run.json"):
        pass
