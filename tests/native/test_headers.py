"""The headers of the native core, without Python, under sanitizers or for aarch64: ranks are threads of one program."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HEADERS = HERE.parents[1] / "src/native"
COMPILER = shutil.which("g++")
CROSS_COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static")


@pytest.mark.skipif(COMPILER is None, reason="there is no g++")
@pytest.mark.parametrize("sanitizers", ["thread", pytest.param("address,undefined", marks=pytest.mark.soak)])
def test_ranks_as_threads(sanitizers: str, tmp_path: Path) -> None:
    # GCC says of each fence that -fsanitize=thread does not know it; data is ordered by release and acquire.
    flags = ["-std=c++17", "-O1", "-g", "-fno-strict-aliasing", "-Wno-tsan", "-pthread", f"-fsanitize={sanitizers}"]
    assert ran([str(COMPILER), *flags], [], tmp_path / "ranks") == (0, "0 failed\n", "")


@pytest.mark.soak
@pytest.mark.skipif(
    None in (CROSS_COMPILER, EMULATOR), reason="needs Debian's g++-aarch64-linux-gnu and qemu-user-static"
)
def test_ranks_as_threads_on_aarch64(tmp_path: Path) -> None:
    """Instructions, layouts and roundings of aarch64. The emulator seldom reorders accesses, as a processor may."""
    flags = [
        "-std=c++17",
        "-O3",
        "-static",
        "-ffp-contract=off",
        "-fno-strict-aliasing",
        "-Wall",
        "-Wextra",
        "-pthread",
    ]
    assert ran([str(CROSS_COMPILER), *flags], [str(EMULATOR)], tmp_path / "ranks") == (0, "0 failed\n", "")


def ran(compiler: list[str], emulator: list[str], program: Path) -> tuple[int, str, str]:
    """Build the ranks without a warning and run them; return the exit status, output and errors."""
    command = [*compiler, f"-I{HEADERS}", str(HERE / "ranks.cpp"), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (built.returncode, built.stderr) == (0, "")
    done = subprocess.run([*emulator, str(program)], capture_output=True, text=True, timeout=90, check=False)
    return done.returncode, done.stdout, done.stderr
