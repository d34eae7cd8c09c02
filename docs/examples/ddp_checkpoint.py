"""The checkpoint program of the DDP tutorial, on a plain model: all ranks save it together, and load it.

    python docs/examples/ddp_checkpoint.py 4

There one rank saves, the others wait at a barrier, and each loads all of it. Here every rank writes a part, and no
barrier is needed: when `save` returns on any rank, the checkpoint is whole.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn, optim

import unisono as un


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(self.relu(self.net1(x)))


def demo_checkpoint(comm: un.Communicator, path: str) -> float:
    # Each rank has a GPU of its own where there are enough.
    device = f"cuda:{comm.rank}" if torch.cuda.device_count() >= comm.size else "cpu"
    model = ToyModel().to(device)
    un.broadcast_parameters(model, comm)

    un.checkpoint.save(path, model.state_dict(), comm)

    # As in the tutorial: what rank 0 has saved from its GPU goes to this rank's.
    map_location = {"cuda:0": device}
    model = ToyModel().to(device)
    model.load_state_dict(un.checkpoint.load(path, None, comm, map_location=map_location))
    # Or, in one step and without a second copy: un.checkpoint.load(path, model, comm)

    optimizer = optim.SGD(model.parameters(), lr=0.001)
    outputs = model(torch.randn(20, 10).to(device))
    labels = torch.randn(20, 5).to(device)
    optimizer.zero_grad()
    nn.MSELoss()(outputs, labels).backward()
    un.average_gradients(model, comm)
    optimizer.step()

    un.checkpoint.assert_in_sync(model, comm)
    return sum(p.detach().double().sum().item() for p in model.parameters())


def main(ranks: int = 2, backend: str = "auto") -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        sums = un.launch(demo_checkpoint, ranks, backend, (str(Path(folder) / "model.checkpoint"),))
    print(f"{ranks} ranks ended with equal weights, which sum to {sums[0]:.6f}")
    return sums


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
