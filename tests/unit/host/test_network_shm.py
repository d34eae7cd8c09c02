"""Processors on which ranks may share memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from unisono.host import network
from unisono.host.network import why_no_shm

CASES = {
    ("x86_64", False): "needs unisono's native core: install a wheel, or build unisono with a C++ compiler;",
    ("x86_64", True): None,
    ("aarch64", True): None,
    ("aarch64", False): "needs unisono's native core",
    ("riscv64", True): "needs x86-64 or aarch64, and this processor is riscv64",
}


@pytest.mark.skipif(why_no_shm() is not None, reason=f"{why_no_shm()}")
@pytest.mark.parametrize(("machine", "has_core"), CASES)
def test_refusal_names_processor_and_fix(monkeypatch: pytest.MonkeyPatch, machine: str, has_core: bool) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(network, "native", lambda: SimpleNamespace(Core=object) if has_core else None)
    expected, found = CASES[machine, has_core], why_no_shm()
    assert (found is None) if expected is None else (found is not None and expected in found and "gloo" in found)


@pytest.mark.skipif(why_no_shm() is not None, reason=f"{why_no_shm()}")
def test_core_without_futexes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "native", object)
    assert "needs futexes, which this native core was built without; use backend='tcp'" in str(why_no_shm())
