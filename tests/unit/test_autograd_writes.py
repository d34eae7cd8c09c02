"""Autograd hears of what calls write, whatever moves the bytes."""

from __future__ import annotations

import pytest
from autograd_kit import check_writes

from unisono.testing import pool


@pytest.mark.parametrize("backend", ["thread", "shm", "gloo"])
def test_autograd_hears_of_writes(backend: str) -> None:
    check_writes(pool(backend, 2))
