"""Federated averaging: clients train on data that they keep, and only their models are averaged.

unisono run -n 2 docs/examples/gallery/federated_averaging.py

Twenty clients hold 70 digits each. Either all have the same mix of labels, or each has a mix of its own, drawn from a
Dirichlet distribution: with alpha=0.1 most clients know two or three digits. Uneven mixes cost accuracy. The ranks
share the clients, so any number of ranks computes the same.

Method: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import unisono as un

CLIENTS = 20


def digits():
    """Return 1400 images with their labels to train on, and 397 to test by."""
    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    images, labels = torch.tensor(bunch.data, dtype=torch.float32)[order] / 16, torch.tensor(bunch.target)[order]
    return images[:1400], labels[:1400], images[1400:], labels[1400:]


def local_training(model, images, labels, epochs=5):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for x, y in zip(images.split(10), labels.split(10), strict=True):
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()


def train(comm, partition, rounds=15, per_round=5):
    """Return the accuracy of the average model after each round; in each, some clients train."""
    images, labels, test_images, test_labels = digits()
    parts = un.data.DataPartitioner(labels, [1 / CLIENTS] * CLIENTS, 0, partition=partition(labels))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    un.broadcast_parameters(model, comm)
    generator = torch.Generator().manual_seed(0)
    accuracies = []
    for _ in range(rounds):
        start = nn.utils.parameters_to_vector(model.parameters()).detach()
        total, samples = torch.zeros_like(start), torch.zeros(1)
        for client in torch.randperm(CLIENTS, generator=generator)[:per_round][comm.rank :: comm.size].tolist():
            mine = parts.use(client).indices
            nn.utils.vector_to_parameters(start.clone(), model.parameters())
            local_training(model, images[mine], labels[mine])
            total += len(mine) * nn.utils.parameters_to_vector(model.parameters()).detach()
            samples += len(mine)
        comm.all_reduce(total)
        comm.all_reduce(samples)
        nn.utils.vector_to_parameters(total / samples, model.parameters())
        accuracies.append((model(test_images).argmax(1) == test_labels).float().mean().item())
    return accuracies


def compare(comm, rounds=15):
    """Return the accuracies with the same mix of labels on all clients, and with a mix for each."""
    alike = train(comm, un.data.stratified, rounds)
    return alike, train(comm, lambda labels: un.data.dirichlet(labels, alpha=0.1), rounds)


if __name__ == "__main__":
    torch.set_num_threads(1)  # so small a model gains nothing from more
    with un.init() as comm:
        alike, uneven = compare(comm)
        if comm.rank == 0:
            for number in (2, 4, 9, 14):
                print(f"round {number + 1:2}: {alike[number]:.1%} same mix, {uneven[number]:.1%} Dirichlet mixes")
