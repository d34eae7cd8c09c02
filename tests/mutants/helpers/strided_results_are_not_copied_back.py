"""Does not copy results back into a tensor that is not contiguous."""

from __future__ import annotations

import pytest
import torch

from unisono.core.staging import Staging

CHECK = "broadcast_equals_reference"
ERROR = "call='broadcast'.*layout='(?!contiguous)(.|\n)*element"


def put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Staging.flat

    def flat(self: Staging, tensor: torch.Tensor, *, read: bool, write: bool) -> torch.Tensor:
        found = right(self, tensor, read=read, write=write)
        self.after.clear()
        return found

    monkeypatch.setattr(Staging, "flat", flat)
