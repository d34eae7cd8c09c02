"""Internal tensors are on the CPU, whatever the program's default device."""

from __future__ import annotations

import pytest
import torch

import unisono as un
from unisono.testing import pool


@un.rpc.expose
def doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def elsewhere(comm: un.Communicator) -> list[float]:
    """Sums of what comes by a schedule, in rows, as a message, as an object, and from a call."""
    agent = un.rpc.init(comm, f"w{comm.rank}")
    # No memory is behind tensors of this device, so that any use of them fails.
    with torch.device("meta"):
        tensor = torch.full((3,), 1.0, device="cpu")
        comm.all_reduce(tensor, algorithm="ring")
        rows = [torch.zeros(1, device="cpu") for _ in range(comm.size)]
        comm.all_to_all(rows, list(tensor[: comm.size].split(1)))
        comm.all_reduce(tensor[::2], "avg")
        comm.sendrecv(tensor[:1], 1 - comm.rank, tensor[1:2], 1 - comm.rank)
        (objects, _) = comm.all_gather_object(tensor)
        answer = un.rpc.rpc_sync(f"w{1 - comm.rank}", doubled, args=(torch.full((100_000,), 1.0, device="cpu"),))
        comm.barrier()
    agent.shutdown()
    return [sum(row.item() for row in rows), tensor.sum().item(), objects.sum().item(), answer.sum().item()]


@pytest.mark.parametrize("backend", ["thread", "shm", "gloo"])
def test_default_device_does_not_affect_received_tensors(backend: str) -> None:
    assert pool(backend, 2).run(elsewhere) == [[4.0, 6.0, 6.0, 200_000.0]] * 2
