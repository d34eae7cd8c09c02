"""NUMA nodes and the processors of ranks, read from a made-up machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from unisono.host import processors
from unisono.launcher.script_job import ScriptJob
from unisono.tools.doctor.checks.numa import check
from unisono.tools.doctor.examination import Target


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Two nodes of two cores, each core with two threads; node 2 has memory only."""
    for node, cpus in enumerate(("0-1,4-5", "2-3,6-7", "")):
        (tmp_path / f"node/node{node}").mkdir(parents=True)
        (tmp_path / f"node/node{node}/cpulist").write_text(f"{cpus}\n")
    for cpu in range(8):
        (tmp_path / f"cpu/cpu{cpu}/topology").mkdir(parents=True)
        (tmp_path / f"cpu/cpu{cpu}/topology/thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    monkeypatch.setattr(processors, "_SYSTEM", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    return tmp_path


@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize(
    ("ranks", "binding", "placed"),
    [
        (2, "none", ["0-7", "0-7"]),
        (2, "numa", ["0-1,4-5", "2-3,6-7"]),
        (3, "numa", ["0-1,4-5", "0-1,4-5", "2-3,6-7"]),
        (1, "core", ["0-1,4-5"]),
        # The two threads of one core stay together.
        (4, "core", ["0,4", "1,5", "2,6", "3,7"]),
        # More ranks than processors: each has one, and none is left without ranks.
        (10, "core", ["0", "0", "4", "1", "5", "2", "2", "6", "3", "7"]),
    ],
)
def test_consecutive_ranks_share_a_node(ranks: int, binding: processors.Binding, placed: list[str]) -> None:
    assert [processors.shown(cpus) for cpus in processors.placement(ranks, binding)] == placed


@pytest.mark.usefixtures("two_nodes")
def test_processors_outside_the_affinity_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {2, 6}, raising=False)
    assert processors.nodes() == {1: (2, 6)}
    assert processors.placement(2, "core") == [(2,), (6,)]


def test_host_without_a_list_of_nodes_is_one_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(processors, "_SYSTEM", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    assert processors.nodes() == {0: (0, 1)}
    assert processors.placement(2, "numa") == [(0, 1)] * 2


@pytest.mark.usefixtures("two_nodes")
def test_doctor_shows_nodes_and_placement() -> None:
    (finding,) = check(Target(ranks=4))
    assert "node 0 has CPUs 0-1,4-5; node 1 has CPUs 2-3,6-7." in finding.text
    assert "rank(s) 0-1 on node 0; rank(s) 2-3 on node 1" in finding.text


@pytest.mark.usefixtures("two_nodes")
def test_launcher_passes_processors_only_if_asked() -> None:
    job = ScriptJob(["train.py"], 2, binding="numa")
    assert job.environment(1, (1, 2), 0)[processors.BOUND] == "2-3,6-7"
    assert processors.BOUND not in ScriptJob(["train.py"], 2).environment(1, (1, 2), 0)


def test_bound_rank_counts_the_processors_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3}, raising=False)
    bound: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cpus: bound.append(cpus), raising=False)
    monkeypatch.setenv(processors.BOUND, "3")
    processors.bind()
    assert bound == [{3}]
    assert processors.visible() == 8
