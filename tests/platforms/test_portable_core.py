"""The native core as other systems than Linux get it, built here by a switch: backend tcp without futex and eventfd."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a copy of the library with that core."""
    folder = tmp_path_factory.mktemp("portable")
    for name in ("src", "docs", "tests", "setup.py", "pyproject.toml", "README.md", "LICENSE", "licenses"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    for built in (folder / "src/unisono").glob("_native*.so"):
        built.unlink()
    environment = {**os.environ, "UNISONO_PORTABLE": "1", "PYTHONPATH": str(folder / "src")}
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(build, cwd=folder, env=environment, check=True)
    return {**environment, "UNISONO_PORTABLE_ROOT": str(folder)}


@pytest.mark.soak
def test_tcp_conforms_on_the_portable_core(portable: dict[str, str]) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "soak or not soak",
        "-k",
        "TestTcp",
    ]
    done = subprocess.run(
        [*command, "tests/conformance/test_conformance.py"],
        cwd=portable["UNISONO_PORTABLE_ROOT"],
        env=portable,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.soak
def test_shm_says_what_the_portable_core_lacks(portable: dict[str, str]) -> None:
    program = "import unisono; from unisono.host.network import why_no_shm; print(unisono.__file__, why_no_shm())"
    done = subprocess.run([sys.executable, "-c", program], env=portable, capture_output=True, text=True, check=True)
    assert portable["UNISONO_PORTABLE_ROOT"] in done.stdout
    assert "backend 'shm' needs futexes, which this native core was built without; use backend='tcp'" in done.stdout
