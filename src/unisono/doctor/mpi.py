"""The MPI library that mpi4py loads, and the programs that start ranks for one."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from unisono.doctor.running import clean_environment, run

__all__ = ["Library", "Starter", "family", "find_library", "find_starters", "mpi_environment"]

# In a process of its own: a library that does not fit may end the process, and MPI starts but once.
_PROBE = """
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
name, version = MPI.get_vendor()
try:
    files = {line.split()[-1] for line in open("/proc/self/maps") if "/libmpi" in line}
except OSError:
    files = set()
print(json.dumps([mpi4py.__version__, name, ".".join(map(str, version)), min(files, default=None)]))
"""
_NAMES = ("mpiexec", "mpirun")
_SAYS = (
    ("Open MPI", re.compile(r"Open MPI|OpenRTE|PRRTE|prterun", re.IGNORECASE)),
    ("Intel MPI", re.compile(r"Intel\(R\) MPI", re.IGNORECASE)),
    ("MVAPICH", re.compile(r"MVAPICH", re.IGNORECASE)),
    ("MPICH", re.compile(r"HYDRA|MPICH", re.IGNORECASE)),
)
_VERSION = re.compile(r"\b(\d+\.\d+(?:\.\d+)?)")
_QUICK_S = 15.0


@dataclass(frozen=True, slots=True)
class Library:
    """What mpi4py has loaded.

    Attributes:
        mpi4py: Its own version.
        vendor, version: Of the library.
        file: Where it lies, if the system says.
    """

    mpi4py: str
    vendor: str
    version: str
    file: str | None

    def __str__(self) -> str:
        return f"{self.vendor} {self.version}"


@dataclass(frozen=True, slots=True)
class Starter:
    """An mpiexec or mpirun.

    Attributes:
        path: Where it lies.
        vendor: None if it does not say.
        version: Likewise.
        on_path: Whether a shell finds it by its name alone.
    """

    path: Path
    vendor: str | None
    version: str | None
    on_path: bool

    def __str__(self) -> str:
        return f"{self.path} ({' '.join(filter(None, (self.vendor, self.version))) or 'of an unknown MPI'})"

    def fits(self, library: Library) -> bool | None:
        """Whether it can start ranks of this library; None if nobody can say without trying."""
        return None if self.vendor is None else family(self.vendor) == family(library.vendor)


def family(vendor: str) -> str:
    """MPICH and what came of it start each other's ranks; Open MPI does so for itself only.

    Example:
        >>> family("Intel MPI"), family("Open MPI")
        ('MPICH', 'Open MPI')
    """
    return "Open MPI" if "open" in vendor.lower() else "MPICH"


def find_library(limit_s: float) -> Library | str:
    """The library, or why there is none."""
    if find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    ended = run([sys.executable, "-c", _PROBE], limit_s, clean_environment())
    if ended.status == 0:
        return Library(*json.loads(ended.out.strip().splitlines()[-1]))
    return f"mpi4py finds no MPI library that it can load: {ended.why}"


def find_starters() -> list[Starter]:
    """What the path leads to, and what lies beside this Python, where pip puts it.

    Two names in one folder that say the same of themselves count once.
    """
    beside = str(Path(sys.executable).parent)
    found: dict[tuple[Path, str | None, str | None], Starter] = {}
    for search in (None, beside):
        for name in _NAMES:
            path = shutil.which(name, path=search)
            if path is not None:
                starter = _asked(Path(path), on_path=search is None)
                found.setdefault((starter.path.parent, starter.vendor, starter.version), starter)
    return list(found.values())


def _asked(path: Path, *, on_path: bool) -> Starter:
    ended = run([str(path), "--version"], _QUICK_S, clean_environment())
    said = ended.out + ended.err
    vendor = next((name for name, pattern in _SAYS if pattern.search(said)), None)
    version = _VERSION.search(said) if vendor else None
    return Starter(path, vendor, version[1] if version else None, on_path)


def mpi_environment() -> dict[str, str]:
    """For ranks on trial: as many as wanted on few cores, also for root, who has nobody else to be in a container."""
    more = {
        "OMP_NUM_THREADS": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        more |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return clean_environment(**more)
