"""The example in the documents learns the same on both backends, and meets as under torchrun."""

from __future__ import annotations

import importlib.util
import os
import socket
from pathlib import Path

import unisono as un

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "ddp_unchanged.py"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(comm: un.Communicator, path: str, ports: dict[str, int]) -> list[float]:
    spec = importlib.util.spec_from_file_location("ddp_unchanged", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(comm.rank), WORLD_SIZE=str(comm.size))
    weights = []
    for backend, port in ports.items():
        os.environ["MASTER_PORT"] = str(port)
        weights.append(example.main(backend, epochs=2))
    return weights


def test_an_unchanged_program_learns_the_same() -> None:
    ports = {"unisono": free_port(), "gloo": free_port()}
    first, second = un.launch(run, 2, "shm", (str(EXAMPLE), ports), timeout=30)
    assert first == second
    assert first[0] == first[1]
