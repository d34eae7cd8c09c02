"""Lets partial sums grow in the tensors of ranks that get no result."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from unisono import plan
from unisono.tensors import Staging
from unisono.types import ReduceOp

LAW = "reduce_equals_the_reference"
COMPLAINT = "call='reduce'(.|\n)*rank . *: result 0: element"


def put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    right = plan.reduce

    def reduce(staging: Staging, tensor: torch.Tensor, op: ReduceOp, root: int, rank: int, size: int) -> plan.Plan:
        # As if every rank were the root.
        made = right(staging, tensor, op, rank, rank, size)
        made.call = replace(made.call, root=root, outputs=made.call.outputs if rank == root else ())
        return made

    monkeypatch.setattr(plan, "reduce", reduce)
