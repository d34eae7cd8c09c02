"""Line of the user's program that makes the current call, for messages."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from types import CodeType, FrameType, FunctionType

__all__ = [
    "NOT_THE_USERS",
    "call_site",
    "called_at",
    "is_installed",
    "is_internal",
    "is_users",
    "line_of",
    "nearest",
    "site_of",
    "users_frame",
]

# Torch is found without being loaded: processes that only speak to the control plane need none.
_TORCH = getattr(find_spec("torch"), "origin", None) or __file__
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_OTHERS = (_OURS, os.path.dirname(os.path.abspath(_TORCH)) + os.sep)
NOT_THE_USERS = (*_OTHERS, threading.__file__)
_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep


def call_site() -> str | None:
    """The nearest caller outside the library and torch, as "file.py:12"; None if there is none."""
    return site_of(sys._getframe(1))


def site_of(frame: FrameType | None) -> str | None:
    """As `call_site`, of a frame and what called it."""
    found = nearest(frame)
    return None if found is None else f"{os.path.basename(found.f_code.co_filename)}:{found.f_lineno}"


def nearest(frame: FrameType | None) -> FrameType | None:
    """The innermost frame outside the library and torch."""
    while frame is not None and frame.f_code.co_filename.startswith(NOT_THE_USERS):
        frame = frame.f_back
    return frame


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of what the user writes: outside of Python's own library, too, and of installed ones."""
    inner = nearest(frame)
    found = inner
    while found is not None and is_installed(found.f_code.co_filename):
        found = nearest(found.f_back)
    return inner if found is None else found


def is_internal(filename: str) -> bool:
    """Return whether a file of source is this library's."""
    return filename.startswith(_OURS)


def is_installed(filename: str) -> bool:
    """Return whether a file of source is of Python's own library, or of an installed one."""
    return filename.startswith((_LIBRARY, "<frozen")) or f"{os.sep}site-packages{os.sep}" in filename


def is_users(filename: str) -> bool:
    """Return whether a file of source is what the user writes: neither internal nor installed."""
    return not filename.startswith(NOT_THE_USERS) and not is_installed(filename)


def _without_columns(code: CodeType) -> CodeType:
    """Return the code with its first line as that of all instructions, and no columns to be underlined in it."""
    units = len(code.co_code) // 2
    # Entries of up to 8 instructions, each without columns (13) and in the line of the one before.
    entries = (bytes([0x80 | 13 << 3 | min(8, units - start) - 1, 0]) for start in range(0, units, 8))
    return code.replace(co_linetable=b"".join(entries))


_CALL = _without_columns((lambda job: job()).__code__)


def called_at(frame: FrameType | None, job: Callable[[], object]) -> Callable[[], object]:
    """Return a function that does a job as if the line did that has called for it, whatever thread runs it, and when.

    The function's frame has the file and line of the user's one, so that reports and tracebacks name these.

    Args:
        frame: What the user's line has called.
        job: What to do.

    Example:
        >>> called_at(sys._getframe(), call_site)() == call_site()
        True
    """
    caller = nearest(frame)
    if caller is None:
        return job
    code = caller.f_code
    there = _CALL.replace(co_filename=code.co_filename, co_name=code.co_name, co_firstlineno=caller.f_lineno)
    return partial(FunctionType(there, {}), job)


def line_of(code: CodeType, instruction: int) -> str:
    """The file and line of an instruction: a pair that costs less to keep than a line, and keeps nothing alive."""
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= instruction < end and number is not None:
            line = number
            break
    return f"{os.path.basename(code.co_filename)}:{line}"
