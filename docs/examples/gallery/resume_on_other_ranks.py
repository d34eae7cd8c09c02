"""Checkpoint and resume: training stops on two ranks, and goes on from its last checkpoint on three.

python docs/examples/gallery/resume_on_other_ranks.py

The checkpoint holds the model, the optimizer's momentum and the position in the epoch. `GlobalBatchSampler` makes the
same batches on any number of ranks, so the result is that of a training that was never stopped, but for rounding.
"""

import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import unisono as un

STEPS_PER_EPOCH = 29  # 1797 images in batches of 64


def train(comm, folder, until):
    """Train to step `until`; return the step at which this call began, the loss and the weights."""
    bunch = load_digits()
    images, labels = torch.tensor(bunch.data) / 16, torch.tensor(bunch.target)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()
    averager = un.GradientAverager(model, comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    sampler = un.data.GlobalBatchSampler(labels, comm, batch_size=64)
    state = {"model": model, "optimizer": optimizer, "sampler": sampler, "step": 0}
    with un.checkpoint.Checkpointer(folder, comm, every=10) as checkpointer:
        start = checkpointer.load(state) or 0  # the newest; none at the first time
        while state["step"] < until:
            sampler.set_epoch(state["step"] // STEPS_PER_EPOCH)
            for batch in sampler:
                optimizer.zero_grad()
                averager.weight(len(batch))
                functional.cross_entropy(model(images[batch]), labels[batch]).backward()
                optimizer.step()
                sampler.advance()
                state["step"] += 1
                checkpointer.step(state["step"], state)  # saves each tenth step, while training goes on
                if state["step"] == until:
                    break
    averager.remove()
    with torch.no_grad():
        loss = functional.cross_entropy(model(images), labels).item()
    return start, loss, nn.utils.parameters_to_vector(model.parameters()).detach()


def compare(backend="auto"):
    """Return where the second part began, its loss, and its largest difference from an uninterrupted training."""
    with tempfile.TemporaryDirectory() as stopped, tempfile.TemporaryDirectory() as whole:
        un.launch(train, 2, backend, (stopped, 36))
        start, loss, weights = un.launch(train, 3, backend, (stopped, 60))[0]
        _, _, expected = un.launch(train, 1, backend, (whole, 60))[0]
    return start, loss, (weights - expected).abs().max().item()


if __name__ == "__main__":
    start, loss, difference = compare()
    print("2 ranks stopped after step 36, and 3 ranks went on")
    print(f"from step {start} to step 60: loss {loss:.4f}")
    print(f"largest difference from a training that was never stopped: {difference:.0e}")
