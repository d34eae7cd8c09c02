"""Does not copy results back into a tensor that is not contiguous."""

from __future__ import annotations

import pytest
import torch

from unisono.core import tensors

CHECK = "broadcast_equals_reference"
ERROR = "call='broadcast'.*layout='(?!contiguous)(.|\n)*element"


def put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    right = tensors.Staging.target

    def target(self: tensors.Staging, tensor: torch.Tensor, *, read: bool = False) -> torch.Tensor:
        flat = right(self, tensor, read=read)
        self.after.clear()
        return flat

    monkeypatch.setattr(tensors.Staging, "target", target)
