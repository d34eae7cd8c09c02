"""Smoke test of an installed unisono, to run outside of the checkout: `python -W error .ci/smoke.py [BACKEND...]`.

Without shm among the backends, as where the platform has no shared memory of ours, there need be no native core either.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

import unisono as un
from unisono.host.native import native


def program(comm):
    total = torch.tensor([comm.rank + 1.0])
    comm.all_reduce(total)
    return comm.backend, total.item()


def main():
    assert Path(sysconfig.get_path("purelib")) in Path(un.__file__).parents, f"{un.__file__} is not the installed one"
    backends = sys.argv[1:] or ("thread", "shm", "gloo")
    assert native() is not None or "shm" not in backends, "the wheel has no native core"
    # Every public package is in the wheel, and imports without a warning.
    for name in un.__all__:
        getattr(un, name)
    for backend in backends:
        assert un.launch(program, 2, backend, threads=1) == [(backend, 3.0)] * 2
    options = [sys.executable, *(f"-W{option}" for option in sys.warnoptions), "-m", "unisono"]
    for words in (["--version"], ["--help"], ["verify", "ring"], ["doctor", "torch", "extension", "gloo"]):
        subprocess.run([*options, *words], check=True, stdout=subprocess.DEVNULL)
    print(f"unisono {un.__version__} works on Python {sys.version.split()[0]}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
