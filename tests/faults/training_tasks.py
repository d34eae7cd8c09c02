"""Tasks of the small training: a line, which is fast, or handwritten digits, with an accuracy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

__all__ = ["TASKS", "Task"]


@dataclass(frozen=True)
class Task:
    """Samples, and what is made of them.

    Attributes:
        inputs: Float64 of shape (n, features).
        targets: Of shape (n, 1) and float64, or of shape (n,) and int64 where they are classes.
        outputs: How many the model has.
        held_out: As inputs and targets, but not for training.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    outputs: int
    held_out: tuple[torch.Tensor, torch.Tensor]

    def model(self) -> torch.nn.Module:
        """The same on every rank."""
        model = torch.nn.Linear(self.inputs.shape[1], self.outputs).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        return model

    def loss(self, model: torch.nn.Module, samples: Sequence[int]) -> torch.Tensor:
        """The mean over these samples; 0 of none."""
        said, right = model(self.inputs[samples]), self.targets[samples]
        if self.outputs > 1:
            total = torch.nn.functional.cross_entropy(said, right, reduction="sum")
        else:
            total = (said - right).square().sum()
        return total / max(1, len(samples))

    @torch.no_grad()
    def accuracy(self, weights: Sequence[float]) -> float:
        """Return the accuracy of a model with these weights on held-out data."""
        model, inputs, right = self.model(), *self.held_out
        torch.nn.utils.vector_to_parameters(torch.tensor(weights, dtype=torch.float64), model.parameters())
        return float((model(inputs).argmax(dim=1) == right).double().mean())


def _line() -> Task:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(240, 6, generator=generator, dtype=torch.float64)
    targets = inputs @ torch.arange(6.0, dtype=torch.float64)[:, None]
    return Task(inputs, targets, 1, (inputs[:0], targets[:0]))


def _digits() -> Task:
    from sklearn.datasets import load_digits

    found = load_digits()
    inputs, targets = torch.from_numpy(found.data) / 16, torch.from_numpy(found.target)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(5))
    train, test = order[:1440], order[1440:]
    return Task(inputs[train], targets[train], 10, (inputs[test], targets[test]))


TASKS: dict[str, Callable[[], Task]] = {"line": cache(_line), "digits": cache(_digits)}
