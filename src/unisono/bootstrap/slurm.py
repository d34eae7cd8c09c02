"""Slurm: each task of a job step is a rank; the ranks meet on the step's first node.

This module reads the variables that slurmstepd sets for a step: SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID,
SLURM_STEP_NODELIST, SLURM_JOB_ID and SLURM_STEP_ID. The job's name (SLURM_JOB_NAME) is ignored. Outside a step, that
is, in a shell of `salloc` or in the body of an `sbatch` script, the process is a single rank.

MASTER_ADDR and MASTER_PORT, if set, take precedence over the first node and the port from `port_of`.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from unisono.bootstrap.rendezvous import InitRequest, RankClaim, Rendezvous, alone, checked, env_number
from unisono.bootstrap.tcp import find_at
from unisono.errors import CommTimeoutError
from unisono.host.launched import Launched, number

__all__ = [
    "MAX_HOSTS",
    "PREFIXES",
    "START",
    "VARIABLES",
    "SlurmStep",
    "check",
    "detected",
    "expand",
    "find",
    "launched",
    "port_of",
    "step",
]

VARIABLES = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID")
PREFIXES = ("SLURM",)
START = "srun python train.py"

_log = logging.getLogger("unisono")

# Special steps, which are not started by srun (batch script, interactive, external), are numbered downwards from the
# highest number.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_FIRST_PORT = 15000
_PORTS = 16384
_STRIDE = 1009


@dataclass(frozen=True, slots=True)
class SlurmStep:
    """Slurm's description of this task.

    Attributes:
        rank, size, local_rank: The task's number, the number of tasks in the step, and the task's number on its node.
        job, number: Numbers of the job and the step.
        nodes: The step's nodes; empty if Slurm does not list them.
    """

    rank: int
    size: int
    local_rank: int | None
    job: int
    number: int
    nodes: tuple[str, ...]

    @property
    def local_size(self) -> int | None:
        """Return the number of tasks on this node, or None if Slurm does not provide the number."""
        tasks = os.environ.get("SLURM_GTIDS")
        return self.size if len(self.nodes) <= 1 else len(tasks.split(",")) if tasks else None


def port_of(job: int, number: int) -> int:
    """Return the rendezvous port of a step's ranks: 15000 + (job + 1009 * step) mod 16384.

    The port is below the system's ephemeral ports. Consecutive jobs, and the steps of one job, have different ports.

    Example:
        >>> port_of(4711, 0), port_of(4711, 1), port_of(4712, 0)
        (19711, 20720, 19712)
    """
    return _FIRST_PORT + (job + _STRIDE * number) % _PORTS


def launched() -> Launched | None:
    """Return this task's rank in its step; None if this process is not a task of a step."""
    try:
        task = step()
    except ValueError:
        return Launched("Slurm", number("SLURM_PROCID"), number("SLURM_NTASKS"))
    return None if task is None else Launched("Slurm", task.rank, task.size, task.local_rank, task.local_size)


def check(_request: InitRequest) -> None:
    """Raise `ValueError` if the variables of the step are inconsistent."""
    step()


def detected(_request: InitRequest) -> bool:
    """Return whether this process belongs to a Slurm job."""
    return "SLURM_JOB_ID" in os.environ or "SLURM_PROCID" in os.environ


def find(request: InitRequest) -> Rendezvous:
    """Return the rendezvous of a step's tasks. Outside a step, or in a step with one task, there is a single rank."""
    task = step()
    job = os.environ.get("SLURM_JOB_ID", "?")
    if task is None:
        tasks = env_number("SLURM_NTASKS")
        source = f"Slurm job {job} runs no step here: a world of one; start the ranks with srun"
        if tasks is not None and tasks > 1:
            _log.warning("unisono: %s (the job has %d tasks)", source, tasks)
        return replace(alone(request), source=source)
    if task.size == 1:
        return replace(alone(request), source=f"step {job}.{task.number} of Slurm has one task: a world of one")
    return _meet(task, request)


def step() -> SlurmStep | None:
    """Return the step to which this process belongs as a task; None outside a step.

    The body of an sbatch script also has a SLURM_PROCID, although the script is not a rank. The script has a
    SLURM_TASK_PID but no step number, whereas a task of a step has both.

    Raises:
        ValueError: A variable is invalid.
    """
    rank = env_number("SLURM_PROCID")
    number = _first("SLURM_STEP_ID", "SLURM_STEPID")
    size = _first("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    if rank is None or size is None:
        return None
    if number is None and "SLURM_STEP_NUM_TASKS" not in os.environ and "SLURM_TASK_PID" in os.environ:
        return None
    if number is not None and number >= _FIRST_SPECIAL_STEP:
        return None
    rank, size = checked(rank, size)
    names = next(filter(None, map(os.environ.get, _NODE_LISTS)), None)
    nodes = tuple(expand(names)) if names else ()
    return SlurmStep(rank, size, env_number("SLURM_LOCALID"), env_number("SLURM_JOB_ID") or 0, number or 0, nodes)


def _meet(task: SlurmStep, request: InitRequest) -> Rendezvous:
    request.rank = task.rank
    request.size = task.size
    port = env_number("MASTER_PORT")
    if port is None:
        port = port_of(task.job, task.number)
    elif not 0 < port < 65536:
        raise ValueError(f"MASTER_PORT is {port}; a port is a number from 1 to 65535")
    host = os.environ.get("MASTER_ADDR") or ("127.0.0.1" if len(task.nodes) <= 1 else task.nodes[0])
    name = f"{task.job}.{task.number}"
    source = f"rank {task.rank} of {task.size} from Slurm's step {name}, rendezvous at {host}:{port}"
    claim = RankClaim(
        task.rank, task.size, task.local_rank, request.deadline, source, f"slurm{name}-world", restarts=False
    )
    try:
        return find_at(claim, host, port, request.secret)
    except CommTimeoutError as error:
        error.add_note(
            f"In Slurm, step {name} has {task.size} tasks on {len(task.nodes) or 1} node(s), of which "
            f"{task.nodes[0] if task.nodes else host} is the first. Were all of them started by one srun?"
        )
        raise


def _first(*names: str) -> int | None:
    return next((number for number in map(env_number, names) if number is not None), None)


MAX_HOSTS = 65536
"""A host list with more names is considered a mistake, as in Slurm itself."""

# Use possessive quantifiers, so that the match does not backtrack through all possible divisions of an invalid text.
_TEXT = r"[^\[\],\s]++"
_PART = rf"(?:{_TEXT}|\[{_TEXT}(?:,{_TEXT})*+\])"
_LIST = re.compile(rf"{_PART}++(?:,{_PART}++)*+")
_RANGE = re.compile(r"([0-9]{1,18})-([0-9]{1,18})")


def expand(hostlist: str) -> list[str]:
    """Return the names in a Slurm host list, in order.

    Raises:
        ValueError: The list is malformed, or has more than `MAX_HOSTS` names.

    Example:
        >>> expand("node[001-003,7],gpu-a")
        ['node001', 'node002', 'node003', 'node7', 'gpu-a']
    """
    text = hostlist.strip()
    if not _LIST.fullmatch(text):
        raise ValueError(f"{text!r} is not a list of hosts; write it as in node[001-003,7],gpu-a")
    found: list[str] = []
    for item in re.findall(rf"{_PART}++", text):
        names = [""]
        for part in re.findall(_PART, item):
            # Don't create more names than are allowed, so that a short text cannot exhaust memory.
            ends = list(islice(_choices(part), MAX_HOSTS + 1))
            if len(found) + len(names) * len(ends) > MAX_HOSTS:
                raise ValueError(f"{text!r} stands for too many hosts; at most {MAX_HOSTS} are allowed")
            names = [name + end for name in names for end in ends]
        found += names
    return found


def _choices(part: str) -> Iterator[str]:
    """Yield the alternatives for a part of a name: the text itself, or each entry in brackets, with ranges expanded."""
    for choice in part.strip("[]").split(","):
        numbers = _RANGE.fullmatch(choice) if part.startswith("[") else None
        if numbers is None:
            yield choice
            continue
        first, last = map(int, numbers.groups())
        if first > last:
            raise ValueError(f"{part!r} is not a list of hosts: the range {choice} goes down")
        for each in range(first, last + 1):
            yield str(each).zfill(len(numbers[1]))
