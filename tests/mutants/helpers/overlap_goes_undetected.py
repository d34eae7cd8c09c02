"""Treats every tensor as one without overlapping elements."""

from __future__ import annotations

import pytest

from unisono.core import tensors

CHECK = "bad_arguments_are_rejected_before_sending"
ERROR = "ranks differ in counts: .* 4 elements"


def put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "is_non_overlapping", lambda tensor: True)
