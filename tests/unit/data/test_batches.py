"""Means of gradients over batches that differ in size by rank."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import unisono as un
from unisono.testing import run_ranks


def warned(
    how: str, *, batch_size: int = 5, count: int = 20, drop_last: bool = False, steps: int = 3, **averager: Any
) -> list[str]:
    """Return the warnings of a training in which one rank's batches are shorter."""

    def program(comm: un.Communicator) -> None:
        w = torch.zeros(1, requires_grad=True)
        batches = un.data.GlobalBatchSampler(range(count), comm, batch_size=batch_size, drop_last=drop_last)
        if how != "average_gradients":
            handle = un.GradientAverager([w], comm, **averager)
        for _ in range(steps):
            for batch in batches:
                w.grad = None
                if how == "weight":
                    handle.weight(len(batch))
                (w * len(batch)).sum().backward()
                if how == "average_gradients":
                    un.average_gradients([w], comm)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run_ranks(program, 2)
    return [str(each.message) for each in seen if "GlobalBatchSampler" in str(each.message)]


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("plain", {}),
        ("average_gradients", {}),
        # Only the last batch is uneven.
        ("plain", {"batch_size": 4, "count": 19}),
    ],
)
def test_means_without_weights_warn_once(how: str, options: dict[str, Any]) -> None:
    (text,) = warned(how, **options)
    assert "averager.weight(len(batch))" in text


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("weight", {}),
        ("plain", {"average": "sum"}),
        ("plain", {"batch_size": 4}),
        ("plain", {"batch_size": 4, "count": 19, "drop_last": True}),
    ],
)
def test_right_means_do_not_warn(how: str, options: dict[str, Any]) -> None:
    assert warned(how, **options) == []
