"""Returns from a barrier without waiting for any rank."""

from __future__ import annotations

import pytest

from unisono.communicator import Communicator

CHECK = "barrier_waits_for_all_ranks"
ERROR = r"^None: \["


def put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Communicator, "barrier", lambda self, **how: None)
