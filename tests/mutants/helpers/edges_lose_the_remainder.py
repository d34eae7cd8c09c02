"""Cuts a buffer into equal chunks, and forgets what is left."""

from __future__ import annotations

import pytest

from unisono.collectives import chunk_layout

LAW = "all_reduce_equals_the_reference"
COMPLAINT = "call='all_reduce'(.|\n)*element"


def put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        chunk_layout, "even_edges", lambda count, parts: [i * (count // parts) for i in range(parts + 1)]
    )
