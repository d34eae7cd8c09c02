"""Jobs whose ranks may die."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import unisono as un


def soaked(*values: Any) -> Any:
    """Only in `make soak`."""
    return pytest.param(*values, marks=pytest.mark.soak)


def launched(program: Any, size: int, backend: str, *args: Any, **options: Any) -> list[Any]:
    return un.launch(program, size, backend, args, threads=1, on_failure="continue", **{"timeout": 10.0, **options})


def total(comm: Any) -> float:
    tensor = torch.ones(1)
    comm.all_reduce(tensor)
    return float(tensor)
