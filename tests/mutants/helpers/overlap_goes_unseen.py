"""Takes every tensor for one whose elements lie apart."""

from __future__ import annotations

import pytest

from unisono.core import tensors

LAW = "bad_arguments_are_refused_before_anything_is_sent"
COMPLAINT = "ranks differ in counts: .* 4 elements"


def put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "is_non_overlapping", lambda tensor: True)
