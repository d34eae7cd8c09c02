"""Runner of `make gpu`: the tests marked `gpu`, with this interpreter and its torch, within 8 minutes.

Packages that are missing go into a folder of their own, if an index can be reached; torch is never installed. Without
a GPU the tests run on a fake device in the host's memory, which shows what needs no GPU: order, lifetimes and staging;
an interpreter without torch is replaced by that of `make install` then. With a GPU, docs/benchmarks-gpu.md is written
after the tests. What keeps them from running is an error.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
OWN = ROOT / ".venv/bin/python"
PACKAGES = ROOT / ".gpu-packages"
LIMIT_S = 8 * 60.0
INSTALL_WITHIN_S = 240.0
TESTS_NEED = ("pytest", "safetensors")
# The project's own options need plug-ins that may be missing here; its other tests' conftest needs Hypothesis.
OPTIONS = ("-c", os.devnull, "--rootdir", str(ROOT), "--confcutdir", str(ROOT / "tests/gpu"), "-p", "no:cacheprovider")
REPORT = ("benchmarks/_gpu_report.py", "--page", "docs/benchmarks-gpu.md")
MARKERS = "markers=gpu: needs a GPU\nsoak: the long form\nranks: runs on several ranks"


def main(arguments: list[str]) -> int:
    """Run them; the exit status."""
    deadline = time.monotonic() + LIMIT_S
    sys.path.insert(0, str(PACKAGES))
    if find_spec("torch") is None:
        if OWN.exists() and not has_driver():
            os.execv(OWN, [str(OWN), __file__, *arguments])
        print(f"not run: {sys.executable} has no torch; name one that has: make gpu PYTHON=/path/to/python")
        return int(has_driver())
    print(what_there_is(), flush=True)
    missing = install()
    if missing:
        print(f"not run: {', '.join(missing)} missing in {sys.executable}, and could not be installed")
        return 1
    compile_extension()
    paths = [str(ROOT / "src"), str(ROOT / "tests/gpu"), str(PACKAGES)]
    fake = not has_gpu()
    if fake and shutil.which("g++") is None:
        print("not run: no GPU here, and no g++ to compile the fake device")
        return 0
    if fake:
        import fake_device

        paths.append(str(fake_device.build(INSTALL_WITHIN_S)))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    status = within(deadline - time.monotonic(), [sys.executable, *command(arguments)], environ)
    if status or fake or arguments:
        return status
    return within(deadline - time.monotonic(), [sys.executable, *REPORT], environ)


def has_driver() -> bool:
    """Return whether there is a GPU, or the driver of one."""
    return Path("/dev/nvidiactl").exists()


def has_gpu() -> bool:
    """Return whether torch can use a GPU; exit if there is one that it cannot use."""
    import torch

    found = torch.cuda.is_available()
    if not found and has_driver():
        sys.exit(f"torch in {sys.executable} cannot use the GPU; name another one: make gpu PYTHON=/path/to/python")
    return found


def what_there_is() -> str:
    """Torch and the devices of the tests in a line."""
    import torch

    if not has_gpu():
        return f"torch {torch.__version__}; no GPU here, so the tests run on a fake device"
    count = torch.cuda.device_count()
    return f"torch {torch.__version__}, CUDA {torch.version.cuda}, {count} x {torch.cuda.get_device_name(0)}"


def install() -> list[str]:
    """Install what is missing; the packages that are missing still."""
    missing = lacking()
    if missing:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "0"]
        pip += ["--timeout", "10", "--constraint", "constraints.txt", "--target", str(PACKAGES), *missing]
        within(INSTALL_WITHIN_S, pip, dict(os.environ))
        # The folder may be new.
        importlib.invalidate_caches()
    return lacking()


def lacking() -> list[str]:
    """Packages that are not here, of those that the project and these tests need beside torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = (re.split("[^A-Za-z0-9-]", needed)[0] for needed in project["dependencies"])
    here = {found.name.lower().replace("_", "-") for found in distributions()}
    return [name for name in (*own, *TESTS_NEED) if name not in here]


def compile_extension() -> None:
    """Build the native core in place, if there is a compiler; backends shm and tcp need it."""
    compiler = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    within(INSTALL_WITHIN_S, compiler, dict(os.environ))
    sys.path.insert(0, str(ROOT / "src"))
    from unisono.host.native import native

    print("with the native core" if native() else "without the native core, which could not be built")


def command(arguments: list[str]) -> list[str]:
    """Return the arguments of pytest for the tests in this folder."""
    shown = ("-v", "-ra", "--durations", "10", "-o", "faulthandler_timeout=100")
    return ["-m", "pytest", *OPTIONS, "-o", MARKERS, *shown, "-m", "gpu", *arguments, "tests/gpu"]


def within(limit_s: float, words: list[str], environ: dict[str, str]) -> int:
    """Run a program and all that it starts for so long at most; its exit status, 124 if it took longer."""
    with subprocess.Popen(words, cwd=ROOT, env=environ, start_new_session=True) as running:
        try:
            return running.wait(limit_s)
        except subprocess.TimeoutExpired:
            print(f"not done within {limit_s:.0f} s: {' '.join(words)}")
            return 124
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
