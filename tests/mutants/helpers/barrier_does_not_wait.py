"""Returns from a barrier without waiting for anyone."""

from __future__ import annotations

import pytest

from unisono.communicator import Communicator

LAW = "a_barrier_waits_for_everyone"
COMPLAINT = r"^None: \["


def put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Communicator, "barrier", lambda self, **how: None)
