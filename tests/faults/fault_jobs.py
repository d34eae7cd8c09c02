"""Whole jobs of MPI without ulfm: no rank survives a lost one there, so the job ends, and names the cause."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from fault_rows import ODD, SHORT_S, SIZE

from unisono.host.mpi_library import env_without_launcher, find_mpirun

ENDS_S = 10.0
_LIMIT_S = 240.0

# To start takes long on a busy machine; the calls afterwards have a short time limit.
_START = """
import os, signal, sys, time
import torch
import unisono as un
from unisono.transports.mpi.watchdog import Watchdog

torch.set_num_threads(1)
odd, short_s = int(sys.argv[1]), float(sys.argv[2])

def stop(*_):
    os.kill(os.getpid(), signal.SIGSTOP)

comm = un.init("mpi", timeout=120.0)
pieces = [torch.empty(1 << 18) for _ in range(comm.size)]
comm.barrier()
print(f"came at {time.monotonic()}", flush=True)
"""
_GO_ON = """
while True:
    comm.all_gather(pieces, torch.ones(1 << 18), timeout=short_s)
"""

JOBS = {
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "os._exit": "os._exit(3)",
    "SIGSTOP": "stop()",
    "SIGSTOP in a collective": "Watchdog.arm = stop",
    "a frozen rank": "time.sleep(600)",
}
"""Faults of rank 1, after which it goes on as the others do."""

_NAMED = re.compile(rf"rank {ODD}\b[^\n]*(has not arrived|does not answer|was lost|exited on signal)")


def ended(name: str) -> tuple[list[str], float]:
    """Return the faults in the end of a job, and the seconds from the arrival of the last rank until then."""
    program = f"{_START}\nif comm.rank == odd:\n    {JOBS[name]}\n{_GO_ON}"
    mpirun = find_mpirun()
    assert mpirun is not None
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "said").open("w+") as said:
        command = [mpirun, "-n", str(SIZE), sys.executable, "-c", program, str(ODD), str(SHORT_S)]
        process = subprocess.Popen(command, stdout=said, stderr=said, env=environment(), start_new_session=True)
        over_s = _seconds_at_end(process)
        said.seek(0)
        text = said.read()
    came = [float(moment) for moment in re.findall(r"came at ([\d.]+)", text)]
    if over_s is None or len(came) < SIZE:
        return [f"the job did not end, or did not start: {text[-3000:]}"], 0.0
    took_s = over_s - max(came)
    wrong = [] if _NAMED.search(text) else [f"the job does not name rank {ODD}: {text[-3000:]}"]
    if took_s > ENDS_S:
        wrong.append(f"late: the job ended after {took_s:.1f} s, not within {ENDS_S}")
    return wrong, took_s


def environment() -> dict[str, str]:
    """Return the environment of a job of Open MPI in which there may be more ranks than cores."""
    return env_without_launcher(os.environ) | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMP_NUM_THREADS": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
    }


def _seconds_at_end(process: subprocess.Popen[bytes]) -> float | None:
    """The moment when neither mpirun nor any of its ranks was there any more."""
    deadline = time.monotonic() + _LIMIT_S
    while (process.poll() is None or _living(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    over = time.monotonic() < deadline
    for pid in _living(process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    return time.monotonic() if over else None


def _living(session: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(stat.parent.name))
    return found
