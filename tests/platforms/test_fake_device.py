"""Tensors on accelerators, on hosts without one: the tests of `make gpu` on a fake device."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RUNNER = Path(__file__).parents[1] / "gpu" / "run.py"


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to compile the fake device")
@pytest.mark.parametrize(
    "chosen", ["test_gpu_streams and not mpi and not gloo", pytest.param("", marks=pytest.mark.soak)]
)
@pytest.mark.timeout(500)
def test_gpu_tests_pass_on_the_fake_device(chosen: str) -> None:
    command = [sys.executable, str(RUNNER), "-k", chosen]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=480, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "fake device" in ended.stdout
