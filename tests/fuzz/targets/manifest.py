"""Manifest of a checkpoint."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from unisono import checkpoint
from unisono.checkpoint.errors import CheckpointError
from unisono.checkpoint.manifest import MANIFEST, Manifest

REFUSALS = (CheckpointError,)
MEMORY = (4 << 20, 60)


def seeds() -> list[bytes]:
    states = [{"step": 7}, {"w": torch.arange(6.0).reshape(2, 3), "names": ["a", "b"], "deep": {"x": (1, 2.5, None)}}]
    found = []
    with tempfile.TemporaryDirectory(prefix="unisono-fuzz-") as folder:
        for number, state in enumerate(states):
            path = Path(folder) / str(number)
            checkpoint.save(path, state)
            found.append((path / MANIFEST).read_bytes())
    return found


def run(data: bytes) -> None:
    Manifest.from_bytes(data, 1 << 10)
