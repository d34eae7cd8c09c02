"""Divides a buffer into equal chunks, and drops the remainder."""

from __future__ import annotations

import pytest

from unisono.collectives import executor

CHECK = "all_reduce_equals_reference"
ERROR = "call='all_reduce'(.|\n)*element"


def put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "even_edges", lambda count, parts: [i * (count // parts) for i in range(parts + 1)])
