"""`unisono.interop.watch` on programs that stay on gloo: each mistake is named on every rank that lives."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import watched_programs
from watched_programs import RIGHT, WRONG

import unisono as un

DRIVER = Path(watched_programs.__file__)
ABORTED = -6
DIFFER = "MismatchError.*ranks differ in"
ENDED = "PeerLostError.*rank 1 (has ended|was lost|was ended by|ended with)"
NAMED = {
    "operation": f"{DIFFER} operation",
    "order": f"{DIFFER} operation",
    "asynchronous_order": f"{DIFFER} counts",
    "dtype_of_the_same_width": f"{DIFFER} dtype",
    "dtype_of_another_width": f"{DIFFER} dtype",
    "shape": f"{DIFFER} counts",
    "shape_of_gathered_tensors": f"{DIFFER} counts",
    "reduce_operation": f"{DIFFER} op",
    "root_of_broadcast": f"{DIFFER} root",
    "root_of_reduce": f"{DIFFER} root",
    "splits": "MismatchError.*rank 0 sends 3 elements .* to rank 1, which expects 2",
    "objects_on_one_rank": f"{DIFFER} operation",
    "group": "DeadlockError.*rank 0 waits for rank 1",
    "order_of_groups": "DeadlockError.*rank 0 waits for rank 1",
    "dtype_in_a_part": f"{DIFFER} dtype",
    "returns_early": ENDED,
    "branch_of_one_rank": ENDED,
    "reduce_of_a_logger": f"{DIFFER} operation",
    "barrier_too_many": f"{DIFFER} operation",
    "raises": "PeerLostError.*rank 1 failed: KeyError: 'no such sample'",
    "raises_and_cleans_up": "PeerLostError.*rank 1 failed: KeyError: 'no such sample'",
    "exits_with_a_status": ENDED,
    "ends_without_a_word": ENDED,
    "is_killed": ENDED,
    "is_killed_while_others_compute": "PeerLostError.*rank 1 was ended by SIGKILL",
    "is_stopped": "CommTimeoutError.*for rank 1 in all_reduce(.|\n)*rank 1 does not answer: its process is stopped",
    "loops": "CommTimeoutError.*for rank 1 in all_reduce(.|\n)*rank 1 has made no call; its thread is at .* in loops",
    "ddp_with_uneven_batches": ENDED,
    "ddp_with_a_metric_on_one_rank": f"{DIFFER} operation",
    "ddp_that_raises": "PeerLostError.*rank 1 failed: ValueError: a bad batch",
    "ddp_of_different_models": "PeerLostError.*rank 1 failed: RuntimeError.*sizes|ranks differ",
    "ddp_that_is_killed": ENDED,
    "fsdp_with_uneven_batches": ENDED,
    "fsdp_with_a_metric_on_one_rank": f"{DIFFER} operation",
}
FAULTY = ("raise", "kill", "stopped", "status", "word", "early", "uneven", "different_models", "branch")
"""Parts of the names of programs in which rank 1 ends, or is stopped, and need not tell of itself."""


def outcomes(*words: str) -> dict[str, list[dict[str, Any]]]:
    command = [sys.executable, str(DRIVER), *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=True)
    return dict(map(json.loads, ended.stdout.splitlines()))


def check(found: dict[str, list[dict[str, Any]]]) -> None:
    for case, ranks in found.items():
        name = case.rpartition(":")[2]
        for rank, each in enumerate(ranks):
            where = f"{case}, rank {rank}: {each}"
            assert each["status"] is not None, where
            if name in RIGHT:
                assert each["status"] == 0, where
                assert "unisono watch" not in each["stderr"], where
            elif each["status"] != ABORTED and not (rank == 1 and any(word in name for word in FAULTY)):
                assert re.search(NAMED[name], each["stderr"]), where
                assert each["status"] != 0, where


def test_every_wrong_program_has_a_text() -> None:
    assert NAMED.keys() == WRONG.keys()


def test_mistakes_are_named_and_right_programs_run() -> None:
    before = ["before:dtype_of_another_width", "before:overlapping_calls_of_groups"]
    found = outcomes("operation", "order_of_groups", "raises", "is_killed", "all_operations", *before)
    check(found)
    for each in found[before[0]]:
        # Gloo would have ended one of the processes.
        assert each["status"] == 1
        assert "Nothing was sent" in each["stderr"]


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("mode", ["after", "before"])
def test_all_programs(mode: str, ranks: int) -> None:
    check(outcomes("--ranks", str(ranks), *(f"{mode}:{name}" for name in (*WRONG, *RIGHT))))


@pytest.mark.parametrize("how", [{"check": "now"}, {"timeout": 0.0}, {}])
def test_watch_refuses(how: dict[str, Any]) -> None:
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match=r"check must be|timeout|no default group"):
        un.interop.watch(**how)


SCRIPT = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(2))
if dist.get_rank() == 1:
    os.kill(os.getpid(), 9)
dist.all_reduce(torch.ones(2))
"""


@pytest.mark.soak
def test_command_watches_a_script_that_does_not_import_unisono(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    command = [sys.executable, "-m", "unisono", "watch", "--timeout", "20", "--", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env={**os.environ})
    assert ended.returncode != 0
    assert re.search("unisono watch: PeerLostError: rank 0 of 2: rank 1 was (lost|ended by SIGKILL)", ended.stderr)
