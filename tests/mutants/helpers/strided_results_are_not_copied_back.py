"""Does not copy results back into a tensor that is not contiguous."""

from __future__ import annotations

import pytest
import torch

from unisono.core.staging import Staging

CHECK = "broadcast_equals_reference"
ERROR = "call='broadcast'.*layout='(?!contiguous)(.|\n)*element"


def put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Staging.target

    def target(self: Staging, tensor: torch.Tensor, *, read: bool = False) -> torch.Tensor:
        flat = right(self, tensor, read=read)
        self.after.clear()
        return flat

    monkeypatch.setattr(Staging, "target", target)
