"""Data-parallel training of a small convolutional network on handwritten digits.

unisono run -n 2 docs/examples/gallery/digits_cnn.py

`GlobalBatchSampler` divides each batch between the ranks, and `weight` makes the average one over samples, so one, two
or five ranks compute the same model but for rounding. Plain `python` runs the program on one rank.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, random_split

import unisono as un


def digits():
    """Return 1400 images of 8 x 8 to train on, and 397 to test by."""
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    generator = torch.Generator().manual_seed(0)
    return random_split(TensorDataset(images, torch.tensor(bunch.target)), [1400, 397], generator)


def train(comm, epochs=5):
    """Return the accuracy on the test images after each epoch, the same on all ranks."""
    train_set, test_set = digits()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    averager = un.GradientAverager(model, comm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sampler = un.data.GlobalBatchSampler(train_set, comm, batch_size=64)
    loader = DataLoader(train_set, batch_sampler=sampler)
    tests = DataLoader(test_set, batch_size=200, sampler=un.data.PartitionSampler(test_set, comm, shuffle=False))
    accuracies = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            averager.weight(len(labels))
            functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        with torch.no_grad():
            right = torch.cat([model(images).argmax(1) == labels for images, labels in tests])
        accuracies.append(un.data.gather_metrics(comm, {"accuracy": right})["accuracy"])
        if comm.rank == 0:
            print(f"epoch {epoch + 1}: {accuracies[-1]:.1%} of the test images are read correctly", flush=True)
    averager.remove()
    return accuracies


if __name__ == "__main__":
    torch.set_num_threads(1)  # so small a model gains nothing from more
    with un.init() as comm:
        train(comm)
