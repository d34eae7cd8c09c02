"""A parameter server: workers pull parameters and push gradients whenever they are ready, and none waits for another.

python docs/examples/gallery/parameter_server.py

Rank 0 holds the model, and the other ranks call its methods. A larger one, which bounds how old a gradient may be, is
docs/examples/rpc/parameter_server.py.
"""

import threading

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import unisono as un


def digits():
    """Return 1400 images with their labels to train on, and 397 to test by."""
    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    images, labels = torch.tensor(bunch.data, dtype=torch.float32)[order] / 16, torch.tensor(bunch.target)[order]
    return images[:1400], labels[:1400], images[1400:], labels[1400:]


def make_model():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


@un.rpc.expose
class Server:
    def __init__(self):
        self.model = make_model()
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self._lock = threading.Lock()  # each call has a thread of its own
        self.steps = 0

    def pull(self):
        with self._lock:
            return [parameter.detach().clone() for parameter in self.model.parameters()]

    def push(self, gradients):
        with self._lock:
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            self._optimizer.step()
            self.steps += 1


@un.rpc.expose
def work(server, seed, steps):
    """Train on random batches; `server` is a reference, and its methods run on rank 0."""
    images, labels, _, _ = digits()
    model, generator = make_model(), torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for mine, current in zip(model.parameters(), server.rpc_sync().pull(), strict=True):
            mine.data = current
        chosen = torch.randint(len(labels), (32,), generator=generator)
        loss = functional.cross_entropy(model(images[chosen]), labels[chosen])
        server.rpc_sync().push(list(torch.autograd.grad(loss, list(model.parameters()))))


def run(comm, steps=300):
    """Return the server's number of steps and its accuracy on the test images, on rank 0."""
    un.rpc.init(comm)
    result = None
    if comm.rank == 0:
        server = Server()
        reference = un.rpc.RRef(server)
        working = [un.rpc.rpc_async(rank, work, (reference, rank, steps)) for rank in range(1, comm.size)]
        for future in working:
            future.wait()
        _, _, images, labels = digits()
        result = server.steps, (server.model(images).argmax(1) == labels).float().mean().item()
    un.rpc.shutdown()
    return result


if __name__ == "__main__":
    steps, accuracy = un.launch(run, 3)[0]
    print(f"{steps} gradients of 2 workers: {accuracy:.1%} of the test images are read correctly")
