"""The native core: a C++ module, built if a compiler is available, and required by the backends shm and tcp."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from unisono._native import Core, Hosts, Program, Ring, SharedWords, TcpCore

__all__ = ["NO_EXTENSIONS", "NativeCore", "core_build", "native"]

NO_EXTENSIONS = "UNISONO_NO_EXTENSIONS"
"""Environment variable that disables the native extensions if it is not empty."""

_SOURCES = Path(__file__).parents[2] / "native"
"""Sources of the native core in a checkout. They do not exist in an installed package."""


class NativeCore(Protocol):
    """Interface of the native core, a module built with nanobind, for type checkers."""

    BUILD: str
    STATUSES: dict[str, int]
    COLLECTIVES: dict[str, int]
    REDUCE_OPS: dict[str, int]
    MESSAGE_HEADER: str
    Core: type[Core]
    Hosts: type[Hosts]
    Program: type[Program]
    SharedWords: type[SharedWords]
    TcpCore: type[TcpCore]

    def rings_nbytes(self, size: int, ring_bytes: int, /) -> int:
        """Return the size in bytes of the rings between `size` ranks."""

    def rings(self, memory: object, rank: int, size: int, ring_bytes: int, /) -> tuple[list[Ring], list[Ring]]:
        """Return a rank's outgoing and incoming rings: two lists with one ring for each rank of the group."""

    def copy_gradients(self, destinations: Sequence[int], sources: Sequence[int], lengths: Sequence[int], /) -> None:
        """Copy memory, given lists of destination addresses, source addresses, and lengths in bytes."""

    def stop_deadlines(self, stood_s: float, stopped_at_s: float, /) -> None:
        """Extend the deadlines of waiting calls by the time for which a debugger has stopped the ranks."""


@cache
def native() -> NativeCore | None:
    """Return the native core; None if it is missing, disabled, or was built from sources other than this checkout's."""
    if os.environ.get(NO_EXTENSIONS):
        return None
    try:
        import unisono._native as module
    except ImportError:
        return None
    if _SOURCES.is_dir() and getattr(module, "BUILD", None) != _digest():
        warnings.warn("unisono._native was built from other sources and is ignored; run `make install`", stacklevel=2)
        return None
    return module


def core_build() -> str:
    """Return an identifier of the native core's build; "" if there is no native core."""
    module = native()
    return "" if module is None else module.BUILD


def _digest() -> str:
    """Return the digest of the native core's sources, computed as in setup.py."""
    content = b"".join(path.read_bytes() for path in sorted(_SOURCES.rglob("*.[ch]pp")))
    return hashlib.sha256(content).hexdigest()[:16]
