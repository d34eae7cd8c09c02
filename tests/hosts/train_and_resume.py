"""A training script that knows nothing of hosts or launchers, and goes on from its last checkpoint if there is one."""

import os
import signal
import sys
from pathlib import Path

import torch

import unisono as un

STEPS, FATAL = 8, 5


def train(comm: un.Communicator, folder: Path, dies: bool) -> torch.Tensor:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    checkpoint, first = folder / "checkpoint.pt", 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    # The ranks that were not killed may have come further than the file.
    comm.barrier()
    for step in range(first, STEPS):
        data = torch.randn(4, 8, generator=torch.Generator().manual_seed(step * comm.size + comm.rank))
        optimizer.zero_grad()
        model(data).square().mean().backward()
        un.average_gradients(model, comm)
        optimizer.step()
        if comm.rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, folder / "new.pt")
            (folder / "new.pt").replace(checkpoint)
        if dies and step == FATAL and comm.rank == comm.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, dies = Path(sys.argv[1]), sys.argv[2:] == ["dies"]
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    with un.init(timeout=30) as comm:
        weights = train(comm, folder, dies and restarts == 0)
        torch.save((weights, comm.backend, comm.hosts, restarts), folder / f"end-{comm.rank}.pt")
