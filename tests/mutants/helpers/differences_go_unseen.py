"""Finds that all ranks always call the same."""

from __future__ import annotations

import pytest

from unisono.wrappers import consistency

LAW = "different_calls_are_refused_on_every_rank"
COMPLAINT = "ranks differ in count|rank . of 3"


def put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consistency, "explain", lambda prints: "")
