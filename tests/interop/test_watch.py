"""`unisono.interop.watch` on programs that stay on gloo: each mistake is named on every rank that lives."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import watched_programs
from test_torch_frameworks import PROGRAMS, printed
from watched_programs import RIGHT, WRONG

import unisono as un
from unisono.interop.call_watch import watch_at_init

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
    "returns_early_without_a_message": "PeerLostError.*rank 1 has ended.* Then rank . failed",
    "message_after_a_collective": r"DeadlockError.*rank 0 waits for rank 1 in recv \(from rank 1, tag 0\) .*; rank 1",
    "receives_from_each_other": r"DeadlockError.*rank 0 waits for rank 1 in recv \(from rank 1, tag 0\) at .*; rank 1",
    "sends_to_each_other": r"DeadlockError.*rank 0 waits for rank 1 in send \(to rank 1, tag 0\) at .*; rank 1",
    "waits_before_it_sends": r"DeadlockError.*rank 1 waits for rank 0 in recv \(from rank 0, tag 0\) at ",
    "tags_in_another_order": r"DeadlockError.*rank . waits for rank . in recv \(from rank ., tag 2\).*; rank",
    "receive_too_many": r"CommTimeoutError.*waited .* s for rank 1 in recv \(from rank 1(.|\n)*rank 1 .* in receive_",
    "receives_from_any_that_never_send": r"CommTimeoutError.*rank . has waited .* s in recv \(from any rank, tag 0\)",
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
    before = ["before:dtype_of_another_width", "before:overlapping_calls_of_groups", "before:barrier_that_fails"]
    found = outcomes(
        "operation", "order_of_groups", "receives_from_each_other", "raises", "is_killed", "all_operations", *before
    )
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


def as_without_a_watch(ranks: int, *programs: str) -> None:
    """Check that right programs return what they return without a watch, to the last bit, and that nothing is said."""
    plain = outcomes("--ranks", str(ranks), "--no-watch", *programs)
    for mode in ("after", "before"):
        watched = outcomes("--ranks", str(ranks), *(f"{mode}:{name}" for name in programs))
        for name in programs:
            for rank, (expected, found) in enumerate(zip(plain[name], watched[f"{mode}:{name}"], strict=True)):
                where = f"{mode}:{name}, rank {rank}: {expected} {found}"
                assert expected["status"] == found["status"] == 0, where
                assert expected["result"] == found["result"], where
                assert "unisono watch" not in found["stderr"], where


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("ranks", [2, 4])
def test_results_are_those_without_a_watch(ranks: int) -> None:
    from torch_features import FEATURES

    as_without_a_watch(ranks, *FEATURES)


@pytest.mark.parametrize("how", [{"check": "now"}, {"timeout": 0.0}, {}])
def test_watch_refuses(how: dict[str, Any]) -> None:
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match=r"check must be|timeout|no default group"):
        un.interop.watch(**how)


class PythonGroup(dist.ProcessGroup):
    """A backend as torch's extensions may write it, without a name."""

    def getBackendName(self) -> str:  # noqa: N802
        return "python"


def test_group_written_in_python_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    original = dist.init_process_group
    for module in (dist, dist.distributed_c10d):
        monkeypatch.setattr(module, "init_process_group", original)
    watch_at_init("after")
    dist.Backend.register_backend("python", lambda store, rank, size, timeout: PythonGroup(rank, size), devices=["cpu"])
    dist.init_process_group("python", store=dist.HashStore(), rank=0, world_size=2)
    try:
        with pytest.raises(ValueError, match="implemented in Python"):
            un.interop.watch()
    finally:
        dist.destroy_process_group()


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def watched(ranks: int, *script: object, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run a script under torchrun, by `unisono watch`."""
    words = [sys.executable, "-m", "unisono", "watch", "--timeout", "20", *options, "--", *TORCHRUN, str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*words, *map(str, script)], capture_output=True, text=True, timeout=200, check=False, env=environment
    )


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["after", "before"])
@pytest.mark.parametrize("framework", ["fsdp2", "accelerate", "lightning"])
def test_mistake_in_a_framework_is_named(framework: str, mode: str) -> None:
    program = Path(__file__).with_name("watched_frameworks.py")
    ended = watched(2, program, framework, options=("--check", mode))
    assert ended.returncode != 0
    assert re.search(r"rank 0: .* at (\w+.py:\d+, called by )?watched_frameworks.py:\d+; rank 1:", ended.stderr)
    named = re.findall("unisono watch: MismatchError: rank ([01]) of 2: ranks differ in operation", ended.stderr)
    # With "after", gloo may end a process before the watch's report does.
    aborted = ended.stderr.count("gloo::EnforceNotMet") * (mode == "after")
    assert len({*named}) + aborted >= 2, ended.stderr


@pytest.mark.soak
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_right_program_of_a_framework_prints_the_same(program: Path) -> None:
    ended = watched(2, program, "--backend", "gloo")
    assert ended.returncode == 0, ended.stderr
    assert "unisono watch" not in ended.stderr
    assert ended.stdout.replace("gloo", "the backend") == printed(program, 2, "gloo")


KILLED = """
import os, sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
for step in range(10**6):
    model(torch.ones(8, 64)).sum().backward()
    if step == 20 and dist.get_rank() == 1:
        print("KILLED", time.time(), flush=True)
        os.kill(os.getpid(), 9)
"""


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["after", "before"])
def test_killed_rank_is_named_within_a_second_and_nothing_remains(mode: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(KILLED)
    command = [sys.executable, "-m", "unisono", "watch", "--check", mode, "--", *TORCHRUN, "4", str(script)]
    # All processes, and the one that compares the calls, inherit this.
    marked = f"UNISONO_TEST={tmp_path}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "UNISONO_TEST": str(tmp_path)}
    killed_at = None
    named: dict[int, float] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as job:
        assert job.stdout is not None
        for line in job.stdout:
            if line.startswith("KILLED"):
                killed_at = float(line.split()[1])
            elif found := re.search(r"PeerLostError: rank (\d) of 4: rank 1 was (lost|ended by SIGKILL)", line):
                named.setdefault(int(found[1]), time.time())
    assert job.returncode != 0
    assert killed_at is not None
    assert named.keys() == {0, 2, 3}
    assert max(named.values()) - killed_at < 1.0
    # The process that compares ends after the last rank has.
    until = time.monotonic() + 10.0
    while processes_with(marked) and time.monotonic() < until:
        time.sleep(0.05)
    assert not processes_with(marked)


def processes_with(variable: str) -> list[str]:
    """Return the processes of this host that have a variable in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if variable.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(process.name)
    return found
