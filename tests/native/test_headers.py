"""The headers of the native core, without Python, under sanitizers: ranks are threads of one program."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HEADERS = HERE.parents[1] / "src/native"
COMPILER = shutil.which("g++")


@pytest.mark.skipif(COMPILER is None, reason="there is no g++")
@pytest.mark.parametrize("sanitizers", ["thread", pytest.param("address,undefined", marks=pytest.mark.soak)])
def test_ranks_as_threads(sanitizers: str, tmp_path: Path) -> None:
    program = tmp_path / "ranks"
    # GCC says of each fence that -fsanitize=thread does not know it; data is ordered by release and acquire.
    flags = ["-std=c++17", "-O1", "-g", "-fno-strict-aliasing", "-Wno-tsan", "-pthread", f"-fsanitize={sanitizers}"]
    command = [str(COMPILER), *flags, f"-I{HEADERS}", str(HERE / "ranks.cpp"), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (built.returncode, built.stderr) == (0, "")
    ran = subprocess.run([str(program)], capture_output=True, text=True, timeout=90, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "0 failed\n", "")
