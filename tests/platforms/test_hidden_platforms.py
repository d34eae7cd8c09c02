"""Other systems than Linux: nothing that they lack is called on import, nor by ranks that have to work there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("other_system.py")


@pytest.mark.soak
def test_package_runs_without_names_that_only_linux_has() -> None:
    done = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
