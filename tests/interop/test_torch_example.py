"""The example in the documents learns the same on both backends, and meets as under torchrun."""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch_ranks import reserved_ports

import unisono as un

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "ddp_unchanged.py"


def run(comm: un.Communicator, path: str, ports: dict[str, int]) -> tuple[list[float], list[int]]:
    spec = importlib.util.spec_from_file_location("ddp_unchanged", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(comm.rank), WORLD_SIZE=str(comm.size))
    weights, alive, destroy = [], list[int](), dist.destroy_process_group

    def look_and_destroy() -> None:
        alive.append(sum(type(thing) is DistributedDataParallel for thing in gc.get_objects()))
        destroy()

    dist.destroy_process_group = look_and_destroy
    for backend, port in ports.items():
        os.environ["MASTER_PORT"] = str(port)
        weights.append(example.main(backend, epochs=2))
    return weights, alive


@pytest.mark.soak
def test_unchanged_program_trains_equally() -> None:
    with reserved_ports(2) as (here, there):
        given = (str(EXAMPLE), {"unisono": here, "gloo": there})
        (first, alive), (second, also_alive) = un.launch(run, 2, "shm", given, timeout=30)
    assert first == second
    assert first[0] == first[1]
    # A model that outlives its group on gloo joins gloo's thread while it holds the interpreter lock, for which
    # that thread may be waiting: a plain gloo program hangs there now and then.
    assert alive == also_alive == [0, 0]


@pytest.mark.soak
def test_runs_under_torchrun() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    with reserved_ports(1) as (port,):
        ended = subprocess.run(
            [*torchrun, str(port), str(EXAMPLE)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert ended.returncode == 0, ended.stderr
    # Ends of lines may come after the other rank's next line.
    told = re.findall(r"rank (\d) of 2 on unisono: weights sum to (-?\d+\.\d{12})", ended.stdout)
    assert sorted(rank for rank, _ in told) == ["0", "1"], ended.stdout
    assert len({weights for _, weights in told}) == 1
