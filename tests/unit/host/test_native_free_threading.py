"""Interpreters without the GIL: nothing that unisono loads turns the GIL on, and thread ranks run side by side."""

from __future__ import annotations

import subprocess
import sys
import sysconfig

import pytest

pytestmark = pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this interpreter has a GIL")

PROGRAM = """
import sys
import torch
import unisono as un

def program(comm, turns):
    # Neither rank blocks: each spins until the other has had its turn. A GIL would change hands every 10 s only.
    sys.setswitchinterval(10)
    for turn in range(1000):
        while turns[0] < 2 * turn + comm.rank:
            pass
        turns[0] += 1
    comm.all_reduce(torch.ones(3))
    return sys._is_gil_enabled()

for backend in ("thread", "shm", "gloo"):
    print(backend, un.launch(program if backend == "thread" else lambda comm, turns: sys._is_gil_enabled(),
                             2, backend, args=([0],), threads=1))
"""


@pytest.mark.parametrize("core", ["", "1"], ids=["native", "python"])
def test_gil_stays_off_in_ranks_of_each_backend(core: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        env={"PATH": "/usr/bin:/bin", "UNISONO_NO_EXTENSIONS": core},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout.splitlines() == [f"{backend} [False, False]" for backend in ("thread", "shm", "gloo")], (
        done.stderr
    )
