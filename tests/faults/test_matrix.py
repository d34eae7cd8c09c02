"""Matrix of faults of one rank: every live rank gets the right error soon, and the group stays broken.

`make soak` tries all cells; `make test` a sample that takes each row on one backend, and the deaths on one.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from fault_jobs import JOBS
from fault_matrix import BACKENDS, JOB, table, tried, why_not
from fault_rows import FAULTS

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
SAMPLED = ("thread", "shm", "gloo")
# Half of the rows on threads, which cost least; the core of shared memory compares by itself.
TURNS = ("thread", "shm", "thread", "shm", "thread", "gloo")
HERE = [backend for backend in BACKENDS if backend != "mpi" or find_spec("mpi4py")]
NAMES = list(FAULTS)
CELLS = [(name, backend) for name in FAULTS for backend in HERE if why_not(FAULTS[name], backend) is None]
SLOW = {
    "SIGSTOP, others in messages",
    "SIGTERM",
    "SIGSEGV",
    "os._exit",
    "SIGKILL between calls",
    "SIGKILL in a message",
}
ENDS = {"an early exit", "sys.exit"}
"""Each transport tells others of its end in its own way."""


def soaked(*values: str) -> Any:
    """Only in `make soak`."""
    return pytest.param(*values, marks=pytest.mark.soak)


def _sampled(number: int, name: str, backend: str) -> bool:
    """One backend a row, in turn; deaths on shared memory only, and not all of them."""
    backends = [b for b in TURNS if why_not(FAULTS[name], b) is None]
    if name in ENDS and backend == "thread":
        return True
    if FAULTS[name].fatal or FAULTS[name].check == "full":
        return name not in SLOW and backend == backends[0]
    return name not in SLOW and backend == backends[number % len(backends)]


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        (name, backend) if _sampled(NAMES.index(name), name, backend) else soaked(name, backend)
        for name, backend in CELLS
    ],
)
def test_cell(name: str, backend: str) -> None:
    cell = tried(name, backend)
    assert not cell.wrong, "\n".join(cell.wrong)


@pytest.mark.parametrize("name", [soaked(name) for name in JOBS if "mpi" in HERE])
def test_job_ends_without_ulfm(name: str) -> None:
    cell = tried(name, JOB)
    assert not cell.wrong, "\n".join(cell.wrong)


def test_matrix_has_enough_cells() -> None:
    assert len(FAULTS) >= 40
    for backend in SAMPLED:
        assert sum(why_not(fault, backend) is None for fault in FAULTS.values()) >= 40


def test_page_shows_the_matrix() -> None:
    """Its times are of the day when it was made; its rows, and what cannot be, are those of the tests."""
    page = PAGE.read_text()
    missing = [line.split(" | ")[0] for line in table({}).splitlines() if line.split(" | ")[0] not in page]
    assert not missing, "run tests/faults/write_matrix.py"
