"""Check that the launcher's variables are consistent with each other and with the backend."""

from __future__ import annotations

import os
from collections.abc import Iterator

from unisono import bootstrap
from unisono.bootstrap import InitRequest
from unisono.host.launched import Launched
from unisono.host.network import is_loopback
from unisono.tools.doctor.examination import Finding, Target, info, ok, problem
from unisono.tools.doctor.network import addresses

__all__ = ["BY_VARIABLES", "ORDER", "check", "launched"]

ORDER = 60
BY_VARIABLES = ("torchrun", "the environment")
"""Launchers that set RANK and WORLD_SIZE, and don't bind ranks to cores."""
_MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def check(target: Target) -> Iterator[Finding]:
    """Read the environment in the same way as `init`."""
    launch = launched()
    problems = [*_refused(), *_master(launch), *_backend(target, launch)]
    yield from problems
    if not problems:
        yield ok(_words(launch))
    yield from _remarks(target, launch)


def launched() -> Launched:
    """Return this process's rank and launcher, as `init` would; without a launcher, `Launched.by` is empty."""
    return bootstrap.launched() or Launched("", None, None)


def _refused() -> Iterator[Finding]:
    """Yield the error that `init` would raise, with the same text."""
    request = InitRequest(None, None, None, 0.0, None)
    launcher = next((each for each in bootstrap.launchers() if each.detected(request)), None)
    if launcher is None:
        return
    try:
        launcher.check(request)
    except ValueError as error:
        missing = next((name for name in _MEETING if name in launcher.VARIABLES and not os.environ.get(name)), None)
        if missing is not None and request.rank is not None:
            yield problem(str(error), f"export {missing}={_MEETING[missing]}   # of the host of rank 0, on every rank")
        else:
            unset = f"unset {' '.join(launcher.VARIABLES)}"
            yield problem(str(error), f"{launcher.START}   # sets them itself; for a world of one: {unset}")


def _master(launch: Launched) -> Iterator[Finding]:
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


def _backend(target: Target, launch: Launched) -> Iterator[Finding]:
    if "mpi" in (target.backend or "").split("+") and launch.by in BY_VARIABLES:
        yield problem(
            f"backend mpi was requested, but {launch.by} has started the ranks: each of them would be an MPI world "
            "of size 1",
            f"mpirun -n {launch.size or 2} python train.py   # or keep {launch.by}, and call un.init('gloo')",
        )


def _words(launch: Launched) -> str:
    if not launch.by:
        return "none: un.init() is a world of one, and un.launch starts ranks itself"
    return f"{launch.by}: rank {launch.rank} of {launch.size}"


def _remarks(target: Target, launch: Launched) -> Iterator[Finding]:
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
