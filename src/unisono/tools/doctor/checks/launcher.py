"""Check that the launcher's variables are consistent with each other and with the backend."""

from __future__ import annotations

import os
from collections.abc import Iterator

from unisono.bootstrap import InitRequest, env, slurm
from unisono.host import mpi_library
from unisono.host.mpi_library import MpiLauncher, number
from unisono.host.network import is_loopback
from unisono.tools.doctor.examination import Finding, Target, info, ok, problem
from unisono.tools.doctor.network import addresses

__all__ = ["BY_VARIABLES", "ORDER", "check", "launched"]

ORDER = 60
BY_VARIABLES = ("torchrun", "the environment")
"""Launchers that set RANK and WORLD_SIZE, and bind no rank to cores."""
_MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
_UNSET = "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"


def check(target: Target) -> Iterator[Finding]:
    """Read the environment as `init` would."""
    launch = launched()
    problems = [*_refused(), *_master(launch), *_backend(target, launch)]
    yield from problems
    if not problems:
        yield ok(_words(launch))
    yield from _remarks(target, launch)


def launched() -> MpiLauncher:
    """Return the launcher, in the order in which `init` looks: torchrun and the environment, MPI, Slurm.

    Its name is empty if there is none. Numbers that are unset or invalid are None.
    """
    if os.environ.get("RANK") or os.environ.get("WORLD_SIZE"):
        by = "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "the environment"
        local = number("LOCAL_RANK"), number("LOCAL_WORLD_SIZE")
        return MpiLauncher(by, number("RANK"), number("WORLD_SIZE"), *local)
    by_mpi = mpi_library.launched()
    if by_mpi is not None:
        return by_mpi
    try:
        task = slurm.step()
    except ValueError:
        return MpiLauncher("Slurm", number("SLURM_PROCID"), number("SLURM_NTASKS"))
    if task is None:
        return MpiLauncher("", None, None)
    return MpiLauncher("Slurm", task.rank, task.size, task.local_rank, task.local_size)


def _refused() -> Iterator[Finding]:
    """Yield the error that `init` would raise, verbatim."""
    request = InitRequest(None, None, None, 0.0, None)
    try:
        if env.detected(request):
            env.read(request)
        elif mpi_library.launched() is None:
            slurm.step()
    except ValueError as error:
        missing = next((name for name in _MEETING if not os.environ.get(name)), None)
        if not env.detected(request):
            yield problem(str(error), "srun python train.py   # which sets Slurm's variables itself")
        elif missing is not None and request.rank is not None:
            yield problem(str(error), f"export {missing}={_MEETING[missing]}   # of the host of rank 0, on every rank")
        else:
            yield problem(str(error), f"{_UNSET}   # for a world of one; or: torchrun --nproc-per-node 2 train.py")


def _master(launch: MpiLauncher) -> Iterator[Finding]:
    host = os.environ.get("MASTER_ADDR")
    if not host:
        return
    found = addresses(host)
    if not found:
        yield problem(f"MASTER_ADDR {host} has no address", f"getent hosts {host}   # then export MASTER_ADDR=...")
    elif launch.on_several_hosts and all(map(is_loopback, found)):
        yield problem(
            f"MASTER_ADDR {host} is the loopback, but only {launch.local_size} of {launch.size} ranks are on this "
            "host: the others would look for rank 0 on their own hosts",
            "export MASTER_ADDR=ADDRESS   # of the host of rank 0; under torchrun: --master-addr ADDRESS",
        )


def _backend(target: Target, launch: MpiLauncher) -> Iterator[Finding]:
    if "mpi" in (target.backend or "").split("+") and launch.by in BY_VARIABLES:
        yield problem(
            f"backend mpi was requested, but {launch.by} has started the ranks: each of them would be an MPI world "
            "of size 1",
            f"mpirun -n {launch.size or 2} python train.py   # or keep {launch.by}, and call un.init('gloo')",
        )


def _words(launch: MpiLauncher) -> str:
    if not launch.by:
        return "none: un.init() is a world of one, and un.launch starts ranks itself"
    return f"{launch.by}: rank {launch.rank} of {launch.size}"


def _remarks(target: Target, launch: MpiLauncher) -> Iterator[Finding]:
    if launch.by == "torchrun" and target.backend is None:
        yield info("under torchrun every backend but mpi can be used; start ranks for mpi with mpirun")
    if not launch.by and "SLURM_JOB_ID" in os.environ:
        yield info(
            f"Slurm job {os.environ['SLURM_JOB_ID']} runs no step here, so this is a world of one",
            "srun python train.py",
        )
    if (launch.on_several_hosts or target.hosts) and not os.environ.get("UNISONO_SECRET"):
        yield info(
            "UNISONO_SECRET is not set: ranks on several hosts can authenticate only if the hosts share your home",
            "export UNISONO_SECRET=$(openssl rand -hex 32)   # once; then the same on every host",
        )
