"""Torch's own tests of process groups, on gloo and on unisono side by side: what passes there passes here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

SUITE = Path(__file__).with_name("c10d_suite.py")
IN_PROCESS = Path(__file__).with_name("c10d_thread_suite.py")
ALL_TO_ALL = ["test_all_to_all", "test_all_to_all_complex", "test_all_to_all_full_group", "test_all_to_all_group"]
"""Tests with uneven lists, which gloo refuses."""

REMAINING = {
    # The test makes a model if the backend's name is gloo, mpi or nccl, and else has none.
    "local variable 'ddp_model' where it is not associated with a value": {
        "test_accumulate_gradients_no_sync",
        "test_accumulate_gradients_no_sync_allreduce_hook",
        "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
        "test_accumulate_gradients_no_sync_grad_is_view",
    },
    # Torch refuses other names than gloo.
    "monitored_barrier is only implemented for GLOO backend": {
        "test_monitored_barrier_failure_order",
        "test_monitored_barrier_gloo",
        "test_monitored_barrier_gloo_subgroup",
        "test_monitored_barrier_wait_all_ranks",
    },
    # The test expects the text of gloo's error; this package's error names the missing ranks.
    '"Rank 0 timed out in monitoredBarrier" does not match': {"test_monitored_barrier_gloo_rank_0_timeout"},
}
"""Tests that pass on gloo alone, by the message of their failure here."""

WATCHED = {
    # One rank waits in vain until the group's timeout, and the watch names the missing ones before.
    "": {"test_barrier_timeout_full_group", "test_barrier_timeout_group"},
}
"""Tests that pass on gloo, and fail on gloo that is watched."""

IN_ONE_PROCESS = {
    # Torch has one profiler for a process.
    "profile starts the profiler of all ranks": {
        "test_isend_autograd_profiler",
        "test_isend_torch_profiler",
        "test_send_recv_any_source_autograd_profiler",
        "test_send_recv_any_source_torch_profiler",
        "test_send_recv_autograd_profiler",
        "test_send_recv_torch_profiler",
        "test_send_recv_with_tag_autograd_profiler",
        "test_send_recv_with_tag_torch_profiler",
    },
    # The tests expect the text of gloo's errors; this package's name the missing ranks.
    '" does not match "': {
        "test_monitored_barrier_failure_order",
        "test_monitored_barrier_gloo",
        "test_monitored_barrier_gloo_rank_0_timeout",
        "test_monitored_barrier_gloo_subgroup",
        "test_monitored_barrier_wait_all_ranks",
    },
    # DDP's log names the backend; torch's C++ code takes a group of the name gloo for its own class.
    "'unisono' != 'gloo'": {"test_ddp_logging_data_cpu"},
    # The test counts the processes.
    "Expected 3 but got 1": {"test_get_rank"},
}
"""Tests that pass on gloo, and fail on ranks of one process, by the message of their failure."""


def outcomes(ranks: int, folder: Path, calls: Sequence[Sequence[str | Path]]) -> list[dict[str, str]]:
    """Return the outcome of every test, by each of the calls, whose last argument is the file of the outcomes."""
    # To torch's tests, gloo is what a backend of the CPU is called; without GPUs they are all for the CPU.
    torch_asks = {"BACKEND": "gloo", "WORLD_SIZE": str(ranks), "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "60"}
    # Torch leaves a temporary file for each test.
    environment = {**os.environ, **torch_asks, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(folder)}
    running = []
    for number, call in enumerate(calls):
        with (folder / f"{number}.log").open("w") as log:
            words = [sys.executable, *call, folder / f"{number}.json"]
            running.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log))
    assert [process.wait() for process in running] == [0] * len(calls)
    return [json.loads((folder / f"{number}.json").read_text()) for number in range(len(calls))]


def remaining(expected: dict[str, str], here: dict[str, str], *known: dict[str, set[str]]) -> set[str]:
    """Return the tests that pass as expected, but fail here: each is known, with the message of its failure."""
    failed = {name for name, outcome in expected.items() if outcome == "passed" and here[name] != "passed"}
    reasons = {name: words for reason in known for words, names in reason.items() for name in names}
    passing = {name for name, outcome in expected.items() if outcome == "passed"}
    assert failed == reasons.keys() & passing
    assert {name: here[name] for name in failed if reasons[name] not in here[name]} == {}
    return failed


@pytest.mark.soak
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("ranks", "transport"), [(2, "shm"), (3, "shm"), (4, "shm"), (8, "shm"), (4, "tcp")])
def test_c10d_tests_pass_as_on_gloo(ranks: int, transport: str, tmp_path: Path) -> None:
    calls = [[SUITE, "gloo", "auto"], [SUITE, "unisono", transport]]
    on_gloo, here = outcomes(ranks, tmp_path, calls)
    passing = [name for name, outcome in on_gloo.items() if outcome == "passed"]
    failed = remaining(on_gloo, here, REMAINING)
    # The last one is for three ranks or more.
    assert [name for name in ALL_TO_ALL[: ranks + 1] if here[name] != "passed"] == []
    # More than 200 at all sizes together, by far.
    assert len(passing) - len(failed) >= 80


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_c10d_tests_pass_on_ranks_of_one_process(tmp_path: Path) -> None:
    calls = [[SUITE, "gloo", "auto"], [IN_PROCESS, "thread"], [IN_PROCESS, "sim"]]
    on_gloo, threads, simulated = outcomes(3, tmp_path, calls)
    for here in (threads, simulated):
        assert len(remaining(on_gloo, here, IN_ONE_PROCESS)) == 15
        assert [name for name in ALL_TO_ALL if here[name] != "passed"] == []


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, 4])
def test_c10d_tests_pass_on_watched_gloo(ranks: int, tmp_path: Path) -> None:
    watched = ["-m", "unisono", "watch", "--check"]
    calls = [[*watched, mode, "--", sys.executable, SUITE, "gloo", "auto"] for mode in ("after", "before")]
    on_gloo, *here = outcomes(ranks, tmp_path, [[SUITE, "gloo", "auto"], *calls])
    for each in here:
        remaining(on_gloo, each, WATCHED)
