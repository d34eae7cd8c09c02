"""Data-parallel training in which ranks have different numbers of batches, and no sample is dropped or repeated.

unisono run -n 3 docs/examples/gallery/uneven_inputs.py

Rank 0 has most of the samples, as if the others' disks were smaller. `join` lets the ranks that have finished an epoch
take part in the others' steps with nothing; `weight` makes every sample count the same, also in short batches.
"""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import unisono as un


def spirals(count=1000):
    """Return points on two spirals, and which spiral each is on."""
    generator = torch.Generator().manual_seed(0)
    along = 3 * torch.rand(count, generator=generator).sqrt()
    side = torch.arange(count) % 2
    angle = 2 * along + side * torch.pi
    points = torch.stack([along * angle.cos(), along * angle.sin()], 1)
    return points + 0.05 * torch.randn(count, 2, generator=generator), side


def train(comm, epochs=30):
    """Return the numbers of samples and batches of each rank, and the accuracy on all samples."""
    points, sides = spirals()
    shares = [1 / 2 ** min(rank + 1, comm.size - 1) for rank in range(comm.size)]
    part = un.data.DataPartitioner(TensorDataset(points, sides), shares).use(comm.rank)
    loader = DataLoader(part, batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(comm.rank))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    averager = un.GradientAverager(model, comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(epochs):
        with averager.join():
            for x, y in loader:
                optimizer.zero_grad()
                averager.weight(len(y))
                functional.cross_entropy(model(x), y).backward()
                optimizer.step()
    averager.remove()
    counts = comm.all_gather_object((len(part), len(loader)))
    with torch.no_grad():
        accuracy = (model(points).argmax(1) == sides).float().mean().item()
    return counts, accuracy


if __name__ == "__main__":
    torch.set_num_threads(1)  # so small a model gains nothing from more
    with un.init() as comm:
        counts, accuracy = train(comm)
        if comm.rank == 0:
            for rank, (samples, batches) in enumerate(counts):
                print(f"rank {rank}: {samples} samples in {batches} batches")
            print(f"{accuracy:.1%} of all samples are on the right side")
