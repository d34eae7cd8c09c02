"""Divides a buffer into chunks that overlap the next."""

from __future__ import annotations

import pytest

from unisono.collectives import chunk_layout

CHECK = "all_reduce_equals_reference"
ERROR = "call='all_reduce'(.|\n)*element"


def put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = chunk_layout.Flat.regions

    def regions(self: chunk_layout.Flat, start: int, stop: int, segment_bytes: int) -> list[chunk_layout.Region]:
        total = self._tensor.numel()
        edges = self._edges
        self._edges = [*edges[:stop], min(total, edges[stop] + 1), *edges[stop + 1 :]]
        try:
            return cut(self, start, stop, segment_bytes)
        finally:
            self._edges = edges

    monkeypatch.setattr(chunk_layout.Flat, "regions", regions)
