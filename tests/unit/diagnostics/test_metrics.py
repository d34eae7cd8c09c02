"""Collectives and buckets in torch's profiler, metrics, and tables in notebooks."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import nullcontext

import torch
from torch.profiler import ProfilerActivity, profile

import unisono as un
from unisono.testing import run_ranks


def profiled(comm: un.Communicator) -> Counter[str]:
    """Return the names that rank 0's profiler sees of a training step and of other calls: it sees its own thread."""
    un.GradientAverager(model := torch.nn.Sequential(torch.nn.Linear(4, 2)), comm)
    comm.barrier()
    with profile(activities=[ProfilerActivity.CPU]) if comm.rank == 0 else nullcontext() as seen:
        model(torch.ones(1, 4)).sum().backward()
        comm.broadcast(torch.ones(3, 5, dtype=torch.float64), 0)
        comm.all_reduce(torch.ones(7), async_op=True).wait()
        comm.send(torch.ones(2), 1) if comm.rank == 0 else comm.recv(torch.ones(2), 0)
        comm.barrier()
    comm.broadcast(torch.ones(3), 0)
    events = [] if seen is None else seen.events()
    return Counter(event.name for event in events if event.name.startswith("unisono::"))


def test_profiler_shows_collectives_and_buckets() -> None:
    seen = run_ranks(profiled, 2, timeout=60)[0]
    assert seen["unisono::broadcast float64[3, 5]"] == 1
    assert seen["unisono::all_reduce float32[7]"] == seen["unisono::wait for all_reduce"] == 1
    assert sum(name.startswith("unisono::bucket '0.") for name in seen) == 1, seen
    assert seen["unisono::send"] == seen["unisono::barrier"] == 1
    assert "unisono::broadcast float32[3]" not in seen


def test_profiler_shows_calls_of_the_fast_path() -> None:
    with un.init() as comm:
        comm.barrier()
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            comm.all_reduce(torch.ones(2))
        comm.barrier()
    assert [event.name for event in seen.events() if "unisono" in event.name] == ["unisono::all_reduce float32[2]"]


def test_metrics_are_prometheus_text() -> None:
    def program(comm: un.Communicator) -> str:
        metrics = un.Metrics()
        with metrics.recording():
            for _ in range(3):
                comm.all_reduce(torch.ones(4))
        comm.all_reduce(torch.ones(4))
        return metrics.prometheus()

    text = run_ranks(program, 2)[1]
    sample = re.compile(r'unisono_[a-z_]+\{operation="[a-z_]+",rank="1"(,le="[^"]+")?\} [-+.e0-9]+')
    for line in text.splitlines():
        assert line.startswith(("# HELP ", "# TYPE ")) or sample.fullmatch(line), line
    assert 'unisono_calls_total{operation="all_reduce",rank="1"} 3\n' in text
    assert 'unisono_bytes_total{operation="all_reduce",rank="1"} 48\n' in text
    assert 'unisono_wait_seconds_bucket{operation="all_reduce",rank="1",le="+Inf"} 3\n' in text
    for name in ("call", "wait"):
        label = f'unisono_{name}_seconds_bucket{{operation="all_reduce"'
        counts = [int(line.split()[-1]) for line in text.splitlines() if line.startswith(label)]
        assert counts == sorted(counts)
        assert counts[-1] == 3


def test_metrics_are_scalars() -> None:
    def program(comm: un.Communicator) -> dict[str, float]:
        metrics = un.Metrics()
        with metrics.recording():
            comm.barrier()
            comm.all_reduce(torch.ones(2))
            comm.all_reduce(torch.ones(2), async_op=True).wait()
            other = torch.ones(3, dtype=torch.float64)
            (comm.isend(other, 1) if comm.rank == 0 else comm.irecv(other, 0)).wait()
        return metrics.scalars()

    called = [f"unisono/{name}/{what}" for name in ("all_reduce", "barrier") for what in ("calls", "bytes", "seconds")]
    waited = ["unisono/all_reduce/wait_seconds", "unisono/barrier/wait_seconds"]
    for rank, found in enumerate(run_ranks(program, 2, backend="shm")):
        message = ("send", "recv")[rank]
        sent = [f"unisono/{message}/{what}" for what in ("calls", "bytes", "seconds")]
        assert found.keys() == {*called, *waited, *sent, f"unisono/i{message}/wait_seconds"}
        assert {type(value) for value in found.values()} == {float}
        assert (found["unisono/all_reduce/calls"], found["unisono/all_reduce/bytes"]) == (2, 16)
        assert (found[f"unisono/{message}/calls"], found[f"unisono/{message}/bytes"]) == (1, 24)
        assert all(value > 0 for name, value in found.items() if name.endswith("seconds"))


def test_scalars_of_ranks_that_share_metrics_are_summed() -> None:
    metrics = un.Metrics()

    def program(comm: un.Communicator) -> None:
        with metrics.recording():
            comm.broadcast(torch.ones(2), 0)

    run_ranks(program, 3)
    assert (metrics.scalars()["unisono/broadcast/calls"], metrics.scalars()["unisono/broadcast/bytes"]) == (3, 24)


def test_trace_and_metrics_record_together() -> None:
    metrics, inner = un.Metrics(), un.Metrics()
    with un.init() as comm, metrics.recording(), inner.recording():
        comm.barrier()
    assert metrics.prometheus() == inner.prometheus() != un.Metrics().prometheus()


def shown(value: object) -> str:
    """Return what a notebook shows of a value."""
    from IPython.core.formatters import HTMLFormatter

    html: str = HTMLFormatter()(value)
    return html


def test_notebooks_show_tables() -> None:
    def program(comm: un.Communicator) -> tuple[str, str]:
        averager = un.GradientAverager(torch.nn.Linear(2, 1), comm)
        return shown(comm), shown(averager)

    run = un.simulate(program, 2, seed=3)
    comm, averager = run.results[1]
    assert "<th>rank</th><td>1 of 2</td>" in comm
    assert "<td>open</td>" in comm
    assert "GradientAverager of 2 parameters in 1 buckets" in averager
    assert "&#x27;bias&#x27;" in averager
    assert "<th>rank 1</th>" in shown(run)
    assert "seed 3" in shown(run)


def test_communicator_shows_its_failure() -> None:
    with un.init() as comm:
        comm.abort("a <test>")
        assert "a &lt;test&gt;" in shown(comm)


def test_recordings_inside_each_other_count_once() -> None:
    def program(comm: un.Communicator) -> list[float]:
        metrics, others = un.Metrics(), un.Metrics()
        with metrics.recording(), others.recording(), metrics.recording():
            comm.barrier()
            with others.recording():
                comm.barrier()
            comm.all_reduce(torch.ones(2), async_op=True).wait()
        comm.barrier()
        names = ("barrier/calls", "all_reduce/calls", "all_reduce/bytes")
        return [each.scalars()[f"unisono/{name}"] for each in (metrics, others) for name in names]

    assert run_ranks(program, 2) == [[2, 1, 8] * 2] * 2
