"""The backend for torch.distributed is under construction: one of its programs has been seen to hang."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Until the cause is found, all of this folder runs in `make soak` only."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.soak)
