"""The programs in docs/examples/frameworks print on unisono what they print on gloo."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from stopped_frameworks import STOP_AT
from torch_ranks import reserved_ports

PROGRAMS = sorted((Path(__file__).parents[2] / "docs" / "examples" / "frameworks").glob("*.py"))
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def printed(program: Path, ranks: int, backend: str) -> str:
    with reserved_ports(1) as (port,):
        torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(port))
        ended = run(*torchrun, str(program), "--backend", backend)
    assert ended.returncode == 0, ended.stderr
    assert f"{ranks} ranks on {backend}\n" in ended.stdout
    return ended.stdout.replace(backend, "the backend")


def test_every_framework_has_a_program() -> None:
    linked = set(re.findall(r"examples/frameworks/(\w+\.py)", PAGE.read_text()))
    assert linked == {program.name for program in PROGRAMS}
    assert len(linked) == 9


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_prints_what_gloo_prints(program: Path, ranks: int) -> None:
    gloo, unisono = (printed(program, ranks, backend) for backend in ("gloo", "unisono"))
    if ranks == 2:
        # a + b is b + a, to the last bit.
        assert unisono == gloo
    else:
        # Four ranks are added in another order than gloo's. All of it is float64.
        assert NUMBER.sub("", unisono) == NUMBER.sub("", gloo)
        found, expected = ([float(number) for number in NUMBER.findall(text)] for text in (unisono, gloo))
        assert len(found) >= 4
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


# -- loaders over samplers and streams of ours ---------------------------------------------------
COUNT = 24
PAGE = Path(__file__).parents[2] / "docs" / "recipes" / "frameworks.md"
OUTCOMES = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|$", PAGE.read_text(), re.MULTILINE)
CASES = [
    (framework, loader, outcome.strip(" `"))
    for loader, *outcomes in OUTCOMES
    for frameworks, outcome in zip((("Lightning", "Fabric"), ("Accelerate", "dispatch")), outcomes, strict=True)
    for framework in frameworks
]


def test_table_of_loaders_is_complete() -> None:
    assert [loader for loader, *_ in OUTCOMES] == [
        "PartitionSampler", "GlobalBatchSampler", "StreamPartition", "ShardPartition"
    ]  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("framework", "loader", "outcome"), CASES)
def test_framework_divides_no_loader_again(framework: str, loader: str, outcome: str, workers: int) -> None:
    program = Path(__file__).with_name("framework_loaders.py")
    given = ("--framework", framework, "--loader", loader, "--workers", str(workers))
    with reserved_ports(1) as (port,):
        torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port))
        ended = run(*torchrun, str(program), *given)
    if outcome == "left as it is":
        assert ended.returncode == 0, ended.stderr
        parts = [json.loads(line) for line in re.findall(r"TAKEN (\[[^]]*\])", ended.stdout)]
        assert [len(part) for part in parts] == [COUNT // 2] * 2
        assert sorted(sample for part in parts for sample in part) == list(range(COUNT))
    else:
        assert ended.returncode == 1
        assert re.search(rf"{outcome}: .*(divide the samples again|divides this rank's part)", ended.stderr)


@pytest.mark.soak
@pytest.mark.parametrize(
    "asks",
    [
        "from accelerate import *; Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend='unisono')])",
        "from transformers import *; TrainingArguments(use_cpu=True, ddp_backend='unisono')",
    ],
    ids=["accelerate", "trainer"],
)
def test_accelerate_rejects_unknown_names(asks: str) -> None:
    ended = run("-c", f"import os; os.environ.update(LOCAL_RANK='0', RANK='0', WORLD_SIZE='2'); {asks}")
    assert "ValueError: Your assigned backend unisono is not available, please use gloo" in ended.stderr


@pytest.mark.soak
@pytest.mark.parametrize("framework", ["Lightning", "Accelerate"])
def test_recipes_stop_at_one_step_and_resume(framework: str, tmp_path: Path) -> None:
    def ended(folder: str, what: str, status: int) -> list[Any]:
        (tmp_path / folder).mkdir(exist_ok=True)
        program = Path(__file__).with_name("stopped_frameworks.py")
        job = run("-m", "unisono", "run", "-n", "2", str(program), framework, str(tmp_path / folder), what)
        assert job.returncode == status, job.stdout + job.stderr
        first, second = re.findall(r"ENDED (\[.*?\])", job.stdout)
        assert first == second
        return list(json.loads(first))

    whole = ended("whole", "run", 0)
    steps, reason, _ = ended("stopped", "stop", 75)
    # How many steps after the signal depends on how soon it is handled.
    assert STOP_AT < steps < whole[0]
    assert reason == "signal SIGTERM"
    resumed = ended("stopped", "resume", 0)
    # Lightning makes the steps that are left, with the loader's first batches.
    assert resumed[:2] == whole[:2]
    assert (resumed == whole) == (framework == "Accelerate")
