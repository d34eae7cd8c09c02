"""The compiled classes, and the tests' way to say that they need them."""

from __future__ import annotations

from importlib import import_module

import pytest

from unisono.compiled import PLAIN, part

__all__ = ["COMPILED", "PLAIN", "both"]

# These make the classes.
for module in ("gradients.filling", "quickly", "transports._again"):
    import_module(f"unisono.{module}")

_REPLACED = ("Doing", "Filling", "Guarded", "Quickly", "Repeats")
_ALONE = ("Hook", "Running", "Storing", "stop_sums", "sum_ahead", "sum_rows")
COMPILED = {name: part(name) for name in (*_REPLACED, *_ALONE)}
# Where there could be an extension and is none, test_compiled.py fails.
both = pytest.mark.skipif(None in COMPILED.values(), reason="no compiler was here when unisono was installed")
