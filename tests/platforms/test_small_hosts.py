"""Containers: little or no /dev/shm, few open files, a refused memfd_create; and many ranks on few processors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
BENCHMARK = HERE.parents[1] / "benchmarks" / "many_ranks.py"


@pytest.mark.soak
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_shm_needs_neither_dev_shm_nor_many_files() -> None:
    done = subprocess.run([sys.executable, HERE / "small_host.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.soak
def test_64_ranks_start_reduce_and_end() -> None:
    # Exits with 1 if a rank is above the bounds that it prints.
    done = subprocess.run([sys.executable, BENCHMARK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
