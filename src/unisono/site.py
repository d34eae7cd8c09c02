"""Which line of the user's program is calling, for messages."""

from __future__ import annotations

import os
import sys

__all__ = ["call_site"]

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def call_site() -> str | None:
    """The nearest caller outside the library, as "file.py:12"; None if there is none."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
