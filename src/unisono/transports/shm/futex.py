"""Futexes of Linux in shared memory."""

from __future__ import annotations

import ctypes
import platform
from functools import cache

__all__ = ["futex_wait", "futex_wake"]

_SYS_FUTEX = 98 if platform.machine() == "aarch64" else 202
_WAIT, _WAKE = 0, 1
_ALL = 0x7FFFFFFF


@cache
def _libc() -> ctypes.CDLL:
    """Return the C library. Not loaded on import, which has to work where there is none, as on Windows."""
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    return library


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def futex_wait(address: int, expected: int, timeout_s: float) -> None:
    """Sleep until another thread wakes this one, unless the value has changed already.

    Args:
        address: Address of 32 bits, or of the lower half of 64 bits.
        expected: The value before the condition was checked.
        timeout_s: The longest sleep, in seconds.
    """
    limit = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
    word, value = ctypes.c_void_p(address), ctypes.c_uint32(expected & 0xFFFFFFFF)
    _libc().syscall(_SYS_FUTEX, word, _WAIT, value, ctypes.byref(limit), None, 0)


def futex_wake(address: int) -> None:
    """Wake every thread that sleeps at an address."""
    _libc().syscall(_SYS_FUTEX, ctypes.c_void_p(address), _WAKE, _ALL, None, None, 0)
