"""One script for every launcher. What differs is how it is started: see docs/how-to/launchers.md."""

import argparse

import torch

import unisono as un


def train(comm, out):
    torch.set_num_threads(1)  # several threads would add in another order
    numbers = torch.Generator().manual_seed(1234)
    images = torch.randn(240, 64, dtype=torch.float64, generator=numbers)
    classes = (images @ torch.randn(64, 10, dtype=torch.float64, generator=numbers)).argmax(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=numbers)
    averager = un.GradientAverager(model.to(comm.device), comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = (part[comm.rank :: comm.size].to(comm.device) for part in (images, classes))
    for _ in range(20):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    averager.remove()
    if comm.rank == 0:
        torch.save(model.state_dict(), out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="auto", help="auto, shm, gloo, nccl, mpi")
    parser.add_argument("--launch", type=int, help="how many ranks to start here (default: a launcher did)")
    parser.add_argument("--out", default="weights.pt", help="file for the weights, which rank 0 saves")
    given = parser.parse_args()
    if given.launch:
        un.launch(train, given.launch, given.backend, args=(given.out,))
    else:
        with un.init(given.backend) as comm:
            train(comm, given.out)
