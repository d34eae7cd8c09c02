"""No launcher's environment, an own secret, and processes that never outlive the test that started them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from doctor_helpers import ALONE, DOCTOR, Seen
from launcher_helpers import LIGHT, started_with
from recipe_helpers import TRAIN

PREFIXES = ("SLURM", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_", "MASTER_", "UNISONO_")
NAMES = (
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "OMP_NUM_THREADS",
)

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove the variables of launchers, so that started programs have none."""
    for name in list(os.environ):
        if name in NAMES or name.startswith(PREFIXES):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a program in a session of its own, with changes to the environment; all of it ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def one(
        command: Sequence[str | Path], env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            list(map(str, command)),
            env={**os.environ, **(env or {})},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield one
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=300)


@pytest.fixture
def light(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the ranks of scripts from a process that has only a stand-in for torch."""
    monkeypatch.setenv("PYTHONPATH", started_with(tmp_path / "light", LIGHT)["PYTHONPATH"])


@pytest.fixture
def doctor(start: Start) -> Callable[..., Seen]:
    """Run it as a user would; `before` is what the command line begins with."""

    def run(*words: str, before: tuple[str, ...] = (), env: dict[str, str] | None = None) -> Seen:
        process = start([*before, *DOCTOR, *words, "--json"], env)
        out, err = process.communicate(timeout=320)
        assert out, err
        said = json.loads(out)
        assert said["ok"] == (process.returncode == 0)
        return Seen(process.returncode, said["findings"])

    return run


@pytest.fixture
def namespaces() -> Callable[[str], tuple[str, ...]]:
    """The beginning of a command that runs after some lines of shell, in namespaces of its own."""
    tried = subprocess.run([*ALONE, "true"], capture_output=True, text=True, timeout=300, check=False)
    if tried.returncode:
        pytest.skip(f"this kernel or user may not make namespaces: {tried.stderr.strip()}")

    def begin(lines: str) -> tuple[str, ...]:
        return (*ALONE, "sh", "-ec", f'{lines}\nexec "$@"', "sh")

    return begin


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Working directory of a user: a script, and a bin folder that comes first in PATH."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "bin").mkdir()
    return tmp_path
