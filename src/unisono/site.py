"""Which line of the user's program is calling, for messages."""

from __future__ import annotations

import os
import sys
import threading

import torch

__all__ = ["call_site"]

_OTHERS = tuple(os.path.dirname(os.path.abspath(module)) + os.sep for module in (__file__, torch.__file__))
_NOT_THE_USERS = (*_OTHERS, threading.__file__)


def call_site() -> str | None:
    """The nearest caller outside the library and torch, as "file.py:12"; None if there is none."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
