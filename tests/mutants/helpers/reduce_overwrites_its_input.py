"""Accumulates partial sums in the tensors of ranks that get no result."""

from __future__ import annotations

import pytest
import torch

from unisono.collectives import plan
from unisono.collectives.arguments import Side
from unisono.core.collective import Collective
from unisono.core.staging import Staging

CHECK = "reduce_equals_reference"
ERROR = "call='reduce'(.|\n)*rank . *: result 0: element"


def put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def _in_place(what: Collective, read: Side, written: Side, staging: Staging) -> torch.Tensor:
        # As if every rank were the root.
        return staging.target((read.tensors or written.tensors)[0], read=True)

    monkeypatch.setattr(plan, "_in_place", _in_place)
