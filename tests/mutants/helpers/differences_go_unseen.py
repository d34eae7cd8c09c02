"""Finds that all ranks always call the same."""

from __future__ import annotations

import pytest

from unisono.wrappers import check

LAW = "different_calls_are_refused_on_every_rank"
COMPLAINT = "ranks differ in count|rank . of 3"


def put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "explain", lambda prints: "")
