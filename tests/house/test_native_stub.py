"""Checkers see the native core through its stub."""

from __future__ import annotations

import pytest

from unisono.host.native import native


def test_stub_is_what_nanobind_prints_of_the_core() -> None:
    pytest.importorskip("nanobind.stubgen")
    if native() is None:
        pytest.skip("there is no native core")
    from native_stub import STUB, printed

    assert STUB.read_text() == printed(), "run: python tests/house/native_stub.py"
