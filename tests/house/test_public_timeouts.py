"""One type of timeouts in the public API: `Timeout`, seconds or a `timedelta`."""

from __future__ import annotations

import inspect

from test_public_docstrings import PUBLIC


def test_public_timeouts_have_one_type() -> None:
    found = {}
    for path, (value, _) in PUBLIC.items():
        function = inspect.getattr_static(value, "__init__") if inspect.isclass(value) else value
        if inspect.isfunction(function) and "timeout" in (taken := inspect.signature(function).parameters):
            found[path] = taken["timeout"].annotation
    assert len(found) >= 40
    assert {path: hint for path, hint in found.items() if hint not in ("Timeout", "Timeout | None")} == {}
