"""Averagers with a fault, each of which one short program must notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import unisono as un
from unisono.gradients.averager import GradientAverager
from unisono.gradients.bucket import BucketContents
from unisono.gradients.reduction import Reduction
from unisono.gradients.weights import Weights
from unisono.testing import run_ranks


class Three(nn.Module):
    """Gradients are the factor, ten times the factor (if used), and three times the factor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Parameter(torch.ones(3)) for _ in range(3))

    def forward(self, factor: torch.Tensor, both: bool = True) -> torch.Tensor:
        loss = (self.first * factor).sum() + (self.third * factor * 3).sum()
        return loss + (self.second * factor * 10).sum() if both else loss

    def gradients(self) -> list[float]:
        found = [-1.0 if p.grad is None else p.grad.mean().item() for p in self.parameters()]
        self.zero_grad()
        return found


def check(comm: un.Communicator) -> None:
    """Known gradients of two ranks: plain, accumulated, skipped, weighted, re-entrant, and uneven."""
    model, mine = Three(), torch.tensor(comm.rank + 1.0)
    averager = un.GradientAverager(model, comm, find_unused_parameters=True, bucket_cap_mb=2e-5, first_bucket_mb=1e-5)
    for step in range(2):
        model(mine).backward()
        assert model.gradients() == [1.5, 15.0, 4.5], f"plain step {step}"
    with averager.no_sync():
        model(mine, comm.rank == 0).backward()
    model(mine, False).backward()
    assert model.gradients() == [3.0, 5.0, 9.0], "what was accumulated"
    model(mine, False).backward()
    assert model.gradients() == [1.5, -1.0, 4.5], "what nobody uses"
    model(mine, comm.rank == 0).backward()
    assert model.gradients() == [1.5, 5.0, 4.5], "what a rank has skipped"
    averager.weight([3, 1][comm.rank])
    model(mine).backward()
    assert model.gradients() == [1.25, 12.5, 3.75], "weights"
    averager.weight([3, 1][comm.rank])
    # The first parameter's gradient comes from inside, 1 times the factor, and then from outside, 14 times.
    checkpoint(model, mine * model.first.mean(), use_reentrant=True).backward()
    assert model.gradients() == [18.75, 12.5, 3.75], "a backward pass inside another"
    last = torch.zeros(3)
    with averager.join():
        for _ in range(comm.rank + 1):
            model(mine).backward()
            last = torch.tensor(model.gradients())
    wanted = torch.tensor([2.0, 20.0, 6.0]) if comm.rank else torch.tensor([1.5, 15.0, 4.5])
    assert torch.equal(last, wanted), "a rank that was through"
    averager.remove()
    model(mine).backward()
    assert model.gradients() == [mine, 10 * mine, 3 * mine], "after remove"


@contextmanager
def forgets_what_is_owed(self: GradientAverager) -> Iterator[None]:
    with original_no_sync(self):
        yield
    self._averaging._accumulated.clear()


def keeps_the_hooks(self: GradientAverager) -> None:
    """Says that it lets go."""


def hands_out_copies_before_the_mean(self: BucketContents, *given: Any) -> None:
    bucket = self.bucket
    kept = [None if p.grad is None else p.grad.clone() for p in bucket.parameters]
    original_fill(self, *given)
    bucket.views = [view if grad is None else grad for view, grad in zip(bucket.views, kept, strict=True)]


def forgets_the_last_buckets(self: Reduction, *given: Any, **also: Any) -> None:
    for contents in self.contents:
        contents.found = contents.bucket.complete
    self.sent = len(self.contents)
    original_last(self, *given, **also)


def weighs_all_alike(self: Weights, n_samples: float) -> None:
    """Says nothing to the others."""


def counts_who_is_through(self: Weights) -> float:
    factor = original_factor(self)
    return factor * self.active / self.comm.size


def takes_all_for_present(self: BucketContents) -> list[tuple[bool, bool]]:
    return [(True, False)] * len(self.inside)


original_no_sync = GradientAverager.no_sync
original_fill, original_last, original_factor = BucketContents.finalize, Reduction.reduce_all, Weights.shared_factor

MUTANTS: list[tuple[type, str, Callable[..., Any]]] = [
    (GradientAverager, "no_sync", forgets_what_is_owed),
    (GradientAverager, "remove", keeps_the_hooks),
    (BucketContents, "finalize", hands_out_copies_before_the_mean),
    (BucketContents, "read_header", takes_all_for_present),
    (Reduction, "reduce_all", forgets_the_last_buckets),
    (Weights, "set", weighs_all_alike),
    (Weights, "shared_factor", counts_who_is_through),
]


def test_unmodified_averager_passes() -> None:
    run_ranks(check, 2)


@pytest.mark.parametrize(("owner", "name", "mutant"), MUTANTS, ids=lambda value: getattr(value, "__name__", value))
def test_faulty_averager_is_detected(
    owner: type, name: str, mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises((AssertionError, un.CommError, AttributeError)):
        run_ranks(check, 2, timeout=2)
