"""Accumulates partial sums in the tensors of ranks that get no result."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from unisono.collectives import arguments
from unisono.core.staging import Staging

CHECK = "reduce_equals_reference"
ERROR = "call='reduce'(.|\n)*rank . *: result 0: element"


def put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def _copied(tensors: Sequence[torch.Tensor], staging: Staging) -> torch.Tensor:
        # As if every rank were the root.
        return staging.flat(tensors[0], read=True, write=True)

    monkeypatch.setattr(arguments, "_copied", _copied)
