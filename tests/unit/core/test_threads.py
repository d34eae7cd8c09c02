"""Ranks are not threads where these are coroutines."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

import unisono as un


@pytest.mark.parametrize("module", ["threading", "queue"])
@pytest.mark.parametrize("backend", ["thread", "sim"])
def test_green_threads_are_refused(backend: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patched = {module}
    here: Any = SimpleNamespace(is_module_patched=lambda module: module in patched)
    monkeypatch.setitem(sys.modules, "gevent.monkey", here)
    with pytest.raises(RuntimeError, match="has replaced Python's threads or queues"):
        un.launch(lambda comm: comm.rank, 2, backend)
    patched.clear()
    assert un.launch(lambda comm: comm.rank, 2, backend) == [0, 1]
