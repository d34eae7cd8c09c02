"""The compiled classes, and the tests' way to say that they need them."""

from __future__ import annotations

from importlib import import_module

import pytest

from unisono.compiled import PLAIN, part

__all__ = ["COMPILED", "PLAIN", "both"]

# It makes the class.
import_module("unisono.gradients.filling")

COMPILED = {name: part(name) for name in ("Filling", "Hook", "Running")}
# Where there could be an extension and is none, test_compiled.py fails.
both = pytest.mark.skipif(None in COMPILED.values(), reason="no compiler was here when unisono was installed")
