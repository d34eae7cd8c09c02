"""Autograd hears of what calls write, and says no on all ranks, whatever moves the bytes."""

from __future__ import annotations

import pytest
from autograd_checks import check_views, check_writes

from unisono.testing import pool


@pytest.mark.parametrize("backend", ["thread", "shm", "gloo"])
def test_writes_increment_autograd_versions(backend: str) -> None:
    check_writes(pool(backend, 2))


@pytest.mark.parametrize("backend", ["thread", "shm", "gloo"])
def test_view_made_under_no_grad_is_rejected_on_every_rank(backend: str) -> None:
    check_views(pool(backend, 2))
