"""One trace of all ranks: its format, its arrows, its clocks, and what the summary finds in it."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono as un
from unisono.comm import tracing
from unisono.core.tracing import TraceEvent, recording
from unisono.diagnostics.trace_file import merged
from unisono.diagnostics.trace_summary import summarize
from unisono.testing import run_ranks
from unisono.tools.cli import main

STEPS = 20


def check_schema(document: dict[str, Any]) -> None:
    """Check the rules of the trace-event format for the phases that we write."""
    number, text = (int, float), str
    events = document["traceEvents"]
    ends: dict[str, list[dict[str, Any]]] = {"s": [], "f": []}
    for event in events:
        assert event["ph"] in ("X", "M", "s", "f"), event
        assert {type(event["pid"]), type(event["tid"])} == {int}, event
        assert (type(event["name"]), type(event["args"])) == (str, dict), event
        assert event["ts"] >= 0, event
        if event["ph"] == "X":
            assert isinstance(event["ts"], number)
            assert isinstance(event["dur"], number)
            assert event["dur"] >= 0
            assert isinstance(event["cat"], text)
        elif event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], text)
        else:
            ends[event["ph"]].append(event)
    ids = [[event["id"] for event in each] for each in ends.values()]
    assert ids[0] == ids[1], "each arrow has a beginning and an end"
    assert len(set(ids[0])) == len(ids[0]), "each arrow has one beginning"
    assert all(event["bp"] == "e" for event in ends["f"])
    check_rows(events)


def check_rows(events: list[dict[str, Any]]) -> None:
    """Check that spans of a row are apart or nested, and that every row and process has a name."""
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for row in rows.values():
        open_until: list[float] = []
        for start, end in sorted(row, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= start + 0.002:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 0.002, "spans of one row overlap"
            open_until.append(end)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert named == rows.keys()
    assert {e["pid"] for e in events if e["name"] == "process_name"} == {pid for pid, _ in rows}


def training(comm: un.Communicator, path: Path, steps: int, before: Callable[[], object] = lambda: None) -> None:
    """Train in buckets, and pass a message to the next rank after each step."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    un.GradientAverager(model, comm, bucket_cap_mb=0.0008)
    with un.trace(path, comm):
        for _ in range(steps):
            loss = model(torch.ones(2, 16)).sum()
            before()
            loss.backward()
            there, back = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
            comm.sendrecv(torch.ones(3), there, torch.empty(3), back)


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Trace of some steps of 4 ranks."""
    path = tmp_path_factory.mktemp("trace") / "run.json"
    run_ranks(training, 4, "thread", path, STEPS, timeout=60)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_trace_of_four_ranks_has_the_format(document: dict[str, Any]) -> None:
    check_schema(document)


BREAKS: dict[str, Callable[[list[dict[str, Any]]], object]] = {
    "unknown phase": lambda events: events[0].update(ph="?"),
    "time as text": lambda events: events[0].update(ts="1"),
    "negative duration": lambda events: events[0].update(dur=-1.0),
    "rank as text": lambda events: events[0].update(pid="0"),
    "overlap": lambda events: events.append(
        {**longest(events), "ts": longest(events)["ts"] + longest(events)["dur"] / 2}
    ),
    "row without a name": lambda events: events.remove(next(e for e in events if e["name"] == "thread_name")),
    "rank without a name": lambda events: events.remove(next(e for e in events if e["name"] == "process_name")),
    "arrow without an end": lambda events: events.remove(next(e for e in events if e["ph"] == "f")),
    "two arrows of one number": lambda events: events.extend([e for e in events if e.get("id") == 1]),
}


def longest(events: list[dict[str, Any]]) -> dict[str, Any]:
    return max((event for event in events if event["ph"] == "X"), key=lambda event: event["dur"])


@pytest.mark.parametrize("name", BREAKS)
def test_schema_finds_what_is_wrong(name: str, document: dict[str, Any]) -> None:
    broken = {**document, "traceEvents": [dict(event) for event in document["traceEvents"]]}
    BREAKS[name](broken["traceEvents"])
    with pytest.raises((AssertionError, TypeError)):
        check_schema(broken)


def test_trace_has_rows_arrows_and_bucket_names(document: dict[str, Any]) -> None:
    events = document["traceEvents"]
    assert {e["args"]["name"].split(" (")[0] for e in events if e["name"] == "process_name"} == {
        f"rank {rank}" for rank in range(4)
    }
    rows = Counter(e["args"]["name"] for e in events if e["name"] == "thread_name")
    assert rows.keys() == {"calls and waits", "buckets", "collectives", "messages"}
    buckets = [e for e in events if e["ph"] == "X" and e["cat"] == "bucket"]
    assert {name for e in buckets for name in e["args"]["parameters"]} == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert len(buckets) >= 4 * STEPS
    arrows = list(zip(*([e for e in events if e["ph"] == ph] for ph in "sf"), strict=True))
    assert len(arrows) == sum(e["ph"] == "X" and e["cat"] == "send" for e in events) >= 4 * STEPS
    assert all(start["pid"] != end["pid"] for start, end in arrows)
    assert all(start["ts"] <= end["ts"] for start, end in arrows)


def test_summary_counts_calls_and_bounds_figures(document: dict[str, Any]) -> None:
    found = summarize(document)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2, 3]
    for rank in found["ranks"]:
        assert rank["calls"] >= STEPS
        assert 0 <= rank["overlap"] <= 1
        assert 0 < rank["exposed_s"] <= rank["time_s"]
    assert all(sum(row["last"].values()) == row["count"] for row in found["buckets"] + found["collectives"])


def test_planted_straggler_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"

    def program(comm: un.Communicator) -> None:
        # Virtual time: the delay of 10 ms is exact, and costs nothing.
        training(comm, path, 5, before=lambda: time.sleep(0.01 if comm.rank == 2 else 0.0))

    un.simulate(program, 4, seed=1)
    check_schema(json.loads(path.read_text()))
    assert main(["trace", "summary", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["straggler"]["rank"] == 2
    assert 0.05 <= found["straggler"]["waited_s"] < 0.06
    late = [row for row in found["buckets"] if row["max_skew_s"] > 0.009]
    assert late
    assert all(row["last"] == {"2": row["count"]} for row in late)
    assert main(["trace", "summary", str(path)]) == 0
    assert "rank 2 is the last at" in capsys.readouterr().out


def test_overlap_is_what_no_wait_covers() -> None:
    def span(cat: str, ts: float, dur: float) -> dict[str, Any]:
        args = {"group": "world", "nbytes": 4, "call": 1}
        return {"name": "all_reduce", "cat": cat, "ph": "X", "ts": ts, "dur": dur, "pid": 0, "tid": 0, "args": args}

    # 80 us in the background, of which the program waits for the last 20.
    events = [span("collective", 0, 80), span("wait", 60, 20), span("wait", 100, 10)]
    (rank,) = summarize({"traceEvents": events})["ranks"]
    assert rank["overlap"] == pytest.approx(0.75)
    assert rank["exposed_s"] == pytest.approx(30e-6)


def test_clocks_of_other_hosts_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = threading.local()
    monkeypatch.setattr(tracing, "_now", lambda: time.perf_counter() + ahead.seconds)

    def program(comm: un.Communicator) -> tuple[float, float]:
        ahead.seconds = 1000.0 * comm.rank
        reading = tracing.ClockReading(comm)
        return abs(reading.offset_s - ahead.seconds), reading.uncertainty_s

    for error, bound in run_ranks(program, 3):
        assert error <= bound < 1.0


def test_clocks_of_one_host_are_one() -> None:
    for clock in run_ranks(tracing.ClockReading, 3):
        assert (clock.offset_s, clock.uncertainty_s) == (0.0, 0.0)


def test_parts_of_a_failed_job_are_merged(tmp_path: Path) -> None:
    def program(comm: un.Communicator) -> None:
        with un.trace(tmp_path / "run.json", comm):
            comm.sendrecv(torch.ones(1), 1 - comm.rank, torch.ones(1), 1 - comm.rank)
            raise KeyError("mistake")

    with pytest.raises(KeyError):
        run_ranks(program, 2)
    parts = [str(tmp_path / f"run.rank{rank}.json") for rank in range(2)]
    assert main(["trace", "merge", str(tmp_path / "run.json"), *parts]) == 0
    document = json.loads((tmp_path / "run.json").read_text())
    check_schema(document)
    assert sum(event["ph"] == "s" for event in document["traceEvents"]) == 2
    assert main(["trace", "merge", str(tmp_path / "run.json"), *parts]) == 2


def test_parts_of_different_runs_are_not_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def program(comm: un.Communicator, name: str) -> None:
        with un.trace(tmp_path / name, comm):
            comm.barrier()
            raise KeyError("mistake")

    for name in ("one.json", "two.json"):
        with pytest.raises(KeyError):
            run_ranks(program, 2, "thread", name)
    merge = ["trace", "merge", str(tmp_path / "whole.json"), str(tmp_path / "one.rank0.json")]
    assert main([*merge, str(tmp_path / "two.rank1.json")]) == 2
    assert "two.rank1.json and " in (error := capsys.readouterr().err)
    assert "are of different runs of unisono.trace" in error
    assert main([*merge, str(tmp_path / "one.rank0.json")]) == 2
    assert "both hold rank 0" in capsys.readouterr().err
    assert not (tmp_path / "whole.json").exists()


def test_arrow_needs_both_ends() -> None:
    lone = {"name": "send to 1", "cat": "send", "ph": "X", "ts": 0, "dur": 1, "pid": 0, "tid": 0, "args": {"flow": "a"}}
    assert merged([[lone]])["traceEvents"] == [lone]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[1]",
        "{}",
        "[" * 100_000,
        "\udcff",
        '{"otherData": {}}',
        '{"traceEvents": [{}], "otherData": {}}',
        '{"traceEvents": [5]}',
        '{"traceEvents": [], "otherData": {"clock_uncertainty_us": "x"}}',
        '{"traceEvents": [{"ph": "X", "args": {"group": 1}}], "otherData": {}}',
    ],
)
def test_file_that_is_no_trace_is_refused(tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    assert main(["trace", "summary", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("unisono trace: ")
    assert error.count("\n") == 1
    assert main(["trace", "merge", str(tmp_path / "merged.json"), str(path)]) == 2
    assert not (tmp_path / "merged.json").exists()


@pytest.mark.parametrize("backend", ["shm", "thread"])
def test_blocking_calls_are_recorded_on_every_path(backend: str) -> None:
    ends = run_ranks(recorded_calls, 2, backend)
    for rank, (collective, message) in enumerate(ends):
        assert [event.kind for event in collective if event.kind != "begin"][-2:] == ["collective", "wait"]
        called = next(event for event in collective if event.kind == "collective")
        assert (called.name, called.nbytes, called.detail["call"], called.detail["op"]) == ("all_reduce", 16, 1, "sum")
        assert (called.detail["dtype"], called.detail["shape"]) == ("float32", (4,))
        assert called.detail["site"].startswith("test_trace_file.py:")
        kind = "recv" if rank else "send"
        assert [(event.kind, event.nbytes) for event in message if event.kind == kind] == [(kind, 8)]
        assert [event.name for event in message if event.kind == "wait"] == [kind]
    flows = {event.detail["flow"] for _, message in ends for event in message if event.kind in ("send", "recv")}
    assert len(flows) == 1


def recorded_calls(comm: un.Communicator) -> tuple[list[TraceEvent], list[TraceEvent]]:
    """Return the events of a collective and of a message."""
    collective: list[TraceEvent] = []
    message: list[TraceEvent] = []
    with recording(collective.append):
        comm.all_reduce(torch.ones(4))
    with recording(message.append):
        comm.send(torch.ones(2), 1) if comm.rank == 0 else comm.recv(torch.ones(2), 0)
    return collective, message
