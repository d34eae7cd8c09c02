"""Ends of jobs under mpirun: by an exception, a death, or the wrong launcher."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

import mpi_jobs
import pytest

# A job ends within this time of what has ended it; to start one took some seconds more.
SOON_S = 10.0

STARTED = """
import os, signal, sys, time
backend, culprit = sys.argv[1], int(sys.argv[2])
comm = un.init(backend, timeout=60)
comm.barrier()
print(f"rank {comm.rank} works at {time.time()}", flush=True)
comm.barrier()
"""
RAISES = """
if comm.rank == culprit:
    raise KeyError("my own mistake")
"""
DIES = """
if comm.rank == culprit:
    os.kill(os.getpid(), signal.SIGKILL)
"""
EXITS = """
if comm.rank == culprit:
    try:
        sys.exit(5)
    except SystemExit:
        comm.barrier()
    sys.exit(3)
comm.barrier()
"""
GOES_ON = """
t = torch.ones(2)
while True:
    comm.all_reduce(t, "max")
"""
SURVIVES = """
t = torch.ones(1 << 18)
try:
    while True:
        comm.all_reduce(t, "max")
except un.errors.PeerLostError as error:
    print(f"rank {comm.rank} lost {error.peer}", flush=True)
"""


def since_it_worked(ended: mpi_jobs.Ended) -> float:
    """Seconds from when the ranks worked to the job's end, at most: the test's own end counts, too."""
    import time

    works = [float(moment) for moment in re.findall(r"works at ([\d.]+)", ended.out)]
    assert works, ended.err
    return time.time() - max(works)


@pytest.mark.soak
def test_exception_ends_the_job_and_is_reported_first(tmp_path: Path) -> None:
    ended = mpi_jobs.mpirun(tmp_path, STARTED + RAISES + GOES_ON, arguments=("mpi", "1"))
    assert ended.status == 1
    assert not ended.left
    first = ended.err[: ended.err.index("Traceback")]
    assert "rank 1 of 2 ends the job" in first
    trace = ended.err[ended.err.index("Traceback") :]
    assert "KeyError: 'my own mistake'" in trace.split("Traceback")[1]
    assert since_it_worked(ended) < SOON_S


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_exception_ends_the_job_on_every_backend(tmp_path: Path, backend: str) -> None:
    ended = mpi_jobs.mpirun(tmp_path, STARTED + RAISES + GOES_ON, 3, arguments=(backend, "0"))
    assert ended.status == 1
    assert not ended.left
    assert "KeyError: 'my own mistake'" in ended.err.split("Traceback")[1]
    assert "rank 0 of 3 ends the job" in ended.err.split("Traceback")[0]


# Of the three, the job of test_mpi_world.py ends like the first.
@pytest.mark.soak
@pytest.mark.parametrize(("backend", "culprit"), [("mpi", 1), ("gloo", 0), ("shm", 1)])
def test_nonzero_exit_status_ends_the_job(tmp_path: Path, backend: str, culprit: int) -> None:
    ended = mpi_jobs.mpirun(tmp_path, STARTED + EXITS + GOES_ON, arguments=(backend, str(culprit)))
    assert ended.status == 3
    assert not ended.left
    assert f"rank {culprit} of 2 ends the job by sys.exit(3)" in ended.err
    assert f"rank {1 - culprit} of 2 ends the job" not in ended.err
    assert since_it_worked(ended) < SOON_S


@pytest.mark.soak
def test_exit_status_after_close_is_kept(tmp_path: Path) -> None:
    last_words = """
    comm.close()
    if comm.rank == culprit:
        sys.exit(3)
    import time
    # Meanwhile the other rank's process ends, mpirun reaps it, and signals this rank if it takes the status for the
    # job's end. That no signal follows is no event to wait for.
    time.sleep(3)
    print("my own last words", flush=True)
    """
    ended = mpi_jobs.mpirun(tmp_path, STARTED + textwrap.dedent(last_words), arguments=("gloo", "1"))
    assert ended.status == 3
    assert "my own last words" in ended.out


@pytest.mark.soak
def test_caught_system_exit_ends_nothing(tmp_path: Path) -> None:
    catches = """
    try:
        sys.exit(3)
    except SystemExit as error:
        kept = error
    comm.barrier()
    """
    ended = mpi_jobs.mpirun(tmp_path, STARTED + textwrap.dedent(catches), arguments=("mpi", "1"))
    assert ended.status == 0, ended.err
    assert "ends the job" not in ended.err


@pytest.mark.soak
def test_finished_rank_is_not_waited_for(tmp_path: Path) -> None:
    returns = "if comm.rank != culprit:\n    comm.barrier()\n"
    ended = mpi_jobs.mpirun(tmp_path, STARTED + returns, arguments=("mpi", "1"))
    assert ended.status == 1
    assert "rank 1 has left" in ended.err.split("Traceback")[0]
    assert since_it_worked(ended) < SOON_S


@pytest.mark.soak
@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize("backend", ["mpi", "gloo"])
def test_killed_rank_ends_the_job(tmp_path: Path, backend: str, culprit: int) -> None:
    ended = mpi_jobs.mpirun(tmp_path, STARTED + DIES + GOES_ON, 3, arguments=(backend, str(culprit)))
    assert ended.status != 0
    assert not ended.left
    assert re.search(rf"rank {culprit}\b.*(lost|exited|\n)", ended.err), ended.err
    assert since_it_worked(ended) < SOON_S


@pytest.mark.soak
@pytest.mark.parametrize("culprit", [0, 1])
def test_survivors_learn_the_lost_rank(tmp_path: Path, culprit: int) -> None:
    program = STARTED + DIES + SURVIVES
    ended = mpi_jobs.mpirun(tmp_path, program, 3, flags=("--with-ft", "ulfm"), arguments=("mpi", str(culprit)))
    for rank in {0, 1, 2} - {culprit}:
        assert f"rank {rank} lost {culprit}" in ended.out, ended.out + ended.err
    assert not ended.left
    assert since_it_worked(ended) < SOON_S


@pytest.mark.soak
def test_torchrun_needs_no_mpi(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import unisono as un\nun.init('mpi', timeout=30)\n")
    ended = mpi_jobs.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)])
    assert ended.status != 0
    assert "torchrun does not start MPI" in ended.err
    assert "mpirun -n 2" in ended.err


@pytest.mark.soak
def test_launcher_of_another_mpi_is_explained(tmp_path: Path) -> None:
    # To the library here, what another launcher tells means nothing: its world is of one.
    ended = mpi_jobs.run(
        [sys.executable, "-c", "import unisono as un; un.init('mpi', timeout=30)"],
        PMI_RANK="0",
        PMI_SIZE="2",
        MPI_LOCALNRANKS="2",
    )
    assert ended.status != 0
    assert "each of them is an MPI world of size 1" in ended.err
    assert "mpiexec" in ended.err.splitlines()[-1]
