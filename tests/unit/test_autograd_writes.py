"""Autograd hears of what calls write, and says no on all ranks, whatever moves the bytes."""

from __future__ import annotations

import pytest
from autograd_kit import check_views, check_writes

from unisono.testing import pool


@pytest.mark.parametrize("backend", ["thread", "shm", "gloo"])
def test_autograd_hears_of_writes(backend: str) -> None:
    check_writes(pool(backend, 2))


@pytest.mark.parametrize("backend", ["thread", "shm", "gloo"])
def test_a_view_made_without_gradients_is_refused_on_every_rank(backend: str) -> None:
    check_views(pool(backend, 2))
