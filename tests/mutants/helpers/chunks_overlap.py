"""Divides a buffer into chunks that overlap the next."""

from __future__ import annotations

import pytest

from unisono.collectives import executor

CHECK = "all_reduce_equals_reference"
ERROR = "call='all_reduce'(.|\n)*element"


def put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = executor.Flat.regions

    def regions(self: executor.Flat, start: int, stop: int, segment_bytes: int) -> list[executor.Region]:
        total = self._tensor.numel()
        edges = self._edges
        self._edges = [*edges[:stop], min(total, edges[stop] + 1), *edges[stop + 1 :]]
        try:
            return cut(self, start, stop, segment_bytes)
        finally:
            self._edges = edges

    monkeypatch.setattr(executor.Flat, "regions", regions)
    monkeypatch.setattr(executor.Flat, "targets", regions)
