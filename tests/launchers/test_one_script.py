"""One script, not a line of it changed, gives the same weights by every launcher."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from launcher_helpers import SCRIPT, finish, task

import unisono as un

Start = Callable[..., "subprocess.Popen[str]"]
Weights = dict[str, torch.Tensor]

PYTHON = (sys.executable, str(SCRIPT))
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def reference() -> Weights:
    """Return the expected weights: the whole dataset in one process, without unisono."""
    numbers = torch.Generator().manual_seed(1234)
    images = torch.randn(240, 64, dtype=torch.float64, generator=numbers)
    classes = (images @ torch.randn(64, 10, dtype=torch.float64, generator=numbers)).argmax(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=numbers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(20):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), classes).backward()
        optimizer.step()
    return dict(model.state_dict())


def far(one: Weights, other: Weights) -> float:
    """The largest difference."""
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def same(one: Weights, other: Weights) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Ways:
    """Each way to start two ranks of the script; each returns the weights that rank 0 saved."""

    def __init__(self, start: Start, folder: Path, port: int) -> None:
        self._start, self._folder, self._port = start, folder, port
        self._runs: Iterator[int] = iter(range(100))

    def _out(self) -> Path:
        return self._folder / f"weights {next(self._runs)}.pt"

    def _run(self, command: tuple[str, ...], backend: str, env: dict[str, str] | None = None) -> Weights:
        out = self._out()
        finish(self._start([*command, "--backend", backend, "--out", out], env))
        return dict(torch.load(out))

    def python(self, backend: str = "auto") -> Weights:
        return self._run((*PYTHON, "--launch", "2"), backend)

    def alone(self) -> Weights:
        return self._run(PYTHON, "auto")

    def torchrun(self, backend: str = "auto") -> Weights:
        return self._run((*TORCHRUN, "--standalone", "--nproc-per-node", "2", str(SCRIPT)), backend)

    def mpirun(self, backend: str) -> Weights:
        env = {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        }
        return self._run(("mpirun", "-n", "2", *PYTHON), backend, env)

    def slurm(self, backend: str = "auto") -> Weights:
        out, job = self._out(), str(os.getpid())
        command = [*PYTHON, "--backend", backend, "--out", out]
        ranks = [self._start(command, task(rank, 2, SLURM_JOB_ID=job)) for rank in range(2)]
        for rank in ranks:
            finish(rank)
        return dict(torch.load(out))


@pytest.fixture
def ways(start: Start, tmp_path: Path, port: int) -> Ways:
    return Ways(start, tmp_path, port)


@pytest.fixture
def mpi() -> None:
    from unisono.transports import TRANSPORTS

    if shutil.which("mpirun") is None or "mpi" not in TRANSPORTS:
        pytest.skip("there is no mpirun here; `unisono doctor` says how to get it")


def test_script_is_short_and_independent_of_launchers() -> None:
    text = SCRIPT.read_text()
    assert len(text.splitlines()) <= 40
    assert not [word for word in ("environ", "RANK", "torchrun", "mpirun", "slurm") if word in text]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """Return the weights of two ranks that `launch` starts here. With two ranks, a + b is b + a on both."""
    out = tmp_path_factory.mktemp("first") / "weights.pt"
    un.launch(runpy.run_path(str(SCRIPT))["train"], 2, "gloo", args=(out,), timeout=60)
    return dict(torch.load(out))


def test_launch(first: Weights) -> None:
    assert far(first, reference()) < 1e-6


@pytest.mark.soak
def test_slurm(first: Weights, ways: Ways) -> None:
    assert same(first, ways.slurm())


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["shm", "gloo", "thread"])
def test_plain_python(first: Weights, ways: Ways, backend: str) -> None:
    assert same(first, ways.python(backend))


@pytest.mark.soak
def test_plain_python_single_rank(first: Weights, ways: Ways) -> None:
    assert far(first, ways.alone()) < 1e-6


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_torchrun(first: Weights, ways: Ways, backend: str) -> None:
    assert same(first, ways.torchrun(backend))


@pytest.mark.soak
@pytest.mark.usefixtures("mpi")
@pytest.mark.parametrize("backend", ["auto", "mpi", "gloo"])
def test_mpirun(first: Weights, ways: Ways, backend: str) -> None:
    assert same(first, ways.mpirun(backend))


@pytest.mark.soak
def test_slurm_with_gloo(first: Weights, ways: Ways) -> None:
    assert same(first, ways.slurm("gloo"))
