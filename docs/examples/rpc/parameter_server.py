"""An asynchronous parameter server: workers push gradients when they have them, and none waits for the slowest.

The server gathers `batch` gradients before it makes a step, and answers all their senders with the new parameters
(batched updates, by an asynchronous function). A gradient that was computed more than `bound` steps ago is not
taken; its worker gets the present parameters instead. That is the staleness bound of Ho et al., "More effective
distributed ML via a stale synchronous parallel parameter server", NeurIPS 2013.
"""

from __future__ import annotations

import argparse
import threading

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.futures import Future
from torch.nn import functional

import unisono as un
from unisono import rpc

State = tuple[int, list[torch.Tensor]]


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images and labels to train on, and to test by."""
    bunch = load_digits()
    images = torch.tensor(bunch.data, dtype=torch.float32) / 16
    labels = torch.tensor(bunch.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1400], order[1400:]
    return images[train], labels[train], images[test], labels[test]


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


@rpc.expose
class Server:
    """Holds the parameters, and steps them.

    Args:
        seed: Of the model.
        batch: Gradients that make a step.
        bound: How many steps old a gradient may be.
        lr: Of SGD with momentum.
    """

    def __init__(self, seed: int, batch: int, bound: int, lr: float) -> None:
        self._model = model(seed)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=lr, momentum=0.9)
        self._batch, self._bound = batch, bound
        self._version, self._refused, self._oldest = 0, 0, 0
        self._given: list[list[torch.Tensor]] = []
        self._answer: Future[State] = Future()
        self._lock = threading.Lock()

    def fetch(self) -> State:
        """The number of steps made, and the parameters after them."""
        with self._lock:
            return self._state()

    @rpc.async_execution
    def push(self, version: int, gradients: list[torch.Tensor]) -> Future[State]:
        """Push a gradient of the parameters of some step; answered when a later step has used it."""
        with self._lock:
            age = self._version - version
            if age > self._bound:
                self._refused += 1
                return _known(self._state())
            self._oldest = max(self._oldest, age)
            self._given.append(gradients)
            answer = self._answer
            if len(self._given) < self._batch:
                return answer
            state = self._step()
        answer.set_result(state)
        return answer

    def finish(self) -> tuple[int, int, int]:
        """Numbers of steps and of refused gradients, and the age of the oldest accepted gradient, in steps.

        A worker that has finished sends no more gradients: workers waiting for a full batch get the present parameters.
        """
        with self._lock:
            self._batch = 1
            state = self._step() if self._given else self._state()
            answer, self._answer = self._answer, Future()
        if not answer.done():
            answer.set_result(state)
        return self._version, self._refused, self._oldest

    def _step(self) -> State:
        for index, parameter in enumerate(self._model.parameters()):
            parameter.grad = torch.stack([gradients[index] for gradients in self._given]).mean(0)
        self._optimizer.step()
        self._version += 1
        self._given, self._answer = [], Future()
        return self._state()

    def _state(self) -> State:
        return self._version, [parameter.detach().clone() for parameter in self._model.parameters()]


def _known(state: State) -> Future[State]:
    future: Future[State] = Future()
    future.set_result(state)
    return future


def work(server: rpc.RRef[Server], rank: int, seed: int, steps: int) -> None:
    """A worker: gradients of batches of its own, on the latest parameters it received."""
    images, labels, _, _ = digits()
    local = model(seed)
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    version, parameters = server.rpc_sync().fetch()
    for _ in range(steps):
        with torch.no_grad():
            for mine, theirs in zip(local.parameters(), parameters, strict=True):
                mine.copy_(theirs)
        chosen = torch.randint(len(labels), (32,), generator=generator)
        local.zero_grad()
        functional.cross_entropy(local(images[chosen]), labels[chosen]).backward()
        gradients = [parameter.grad for parameter in local.parameters()]
        version, parameters = server.rpc_sync().push(version, gradients)


def run(
    comm: un.Communicator, seed: int = 0, steps: int = 400, batch: int = 1, bound: int = 8, lr: float = 0.05
) -> dict[str, float]:
    """Serve on rank 0 and train on all others. Return the results on rank 0."""
    rpc.init(comm, name=f"rank{comm.rank}")
    found: dict[str, float] = {}
    if comm.rank == 0:
        server = rpc.RRef(Server(seed, batch, bound, lr))
        workers = [rpc.rpc_async(rank, work_there, (server, seed, steps), timeout=600) for rank in range(1, comm.size)]
        for done in workers:
            done.wait()
        made, refused, oldest = server.local_value().finish()
        _, _, images, labels = digits()
        trained = model(seed)
        with torch.no_grad():
            for mine, theirs in zip(trained.parameters(), server.local_value().fetch()[1], strict=True):
                mine.copy_(theirs)
            accuracy = (trained(images).argmax(1) == labels).float().mean().item()
        found = {"accuracy": accuracy, "steps": made, "refused": refused, "oldest": oldest}
    rpc.shutdown()
    return found


@rpc.expose
def work_there(server: rpc.RRef[Server], seed: int, steps: int) -> None:
    work(server, rpc.get_worker_info().id, seed, steps)
    server.rpc_sync().finish()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--bound", type=int, default=8)
    given = parser.parse_args()
    print(un.launch(run, given.ranks, kwargs={"seed": given.seed, "batch": given.batch, "bound": given.bound})[0])
