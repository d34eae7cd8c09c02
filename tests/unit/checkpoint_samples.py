"""A small checkpoint for tests that spoil it, and ways to look at it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import unisono as un
from unisono.checkpoint.manifest import MANIFEST, digest
from unisono.testing import run_ranks

MODEL = {"embedding": (40, 50), "weight": (30, 20), "bias": (30,), "scale": ()}


def state_of(seed: int, rows: int = 40) -> dict[str, Any]:
    """Everything that a checkpoint has, in 16 KiB; or with so many rows of 200 bytes instead of 40."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {**MODEL, "embedding": (rows, 50)}
    model = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {"model": model, "counts": torch.arange(500) + seed, "flags": torch.ones(99) > 0, "step": seed}


def saved(path: Path, seed: int, ranks: int = 2, rows: int = 40) -> Path:
    """A checkpoint of such a state."""
    run_ranks(lambda comm: un.checkpoint.save(path, state_of(seed, rows), comm), ranks)
    return path


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two such states are equal."""
    equal = all(torch.equal(one["model"][name], other["model"][name]) for name in MODEL)
    return equal and torch.equal(one["counts"], other["counts"]) and one["step"] == other["step"]


def flat_of(seed: int) -> dict[str, Any]:
    """A state of a large tensor, a small one, an empty one, and a number."""
    big = torch.randn(60_001, generator=torch.Generator().manual_seed(seed))
    return {"big": big, "small": torch.arange(5) + seed, "none": torch.empty(0, 2), "step": seed}


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two such states are equal."""
    return one["step"] == other["step"] and all(torch.equal(one[n], other[n]) for n in ("big", "small", "none"))


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest, with correct digests."""
    text = (path / MANIFEST).read_bytes()
    whole = json.loads(text)["manifest"]
    whole = change(whole) or whole
    body = json.dumps(whole, separators=(",", ":")).encode()
    (path / MANIFEST).write_bytes(b'{"digest":"' + digest(body).encode() + b'","manifest":' + body + b"}\n")
