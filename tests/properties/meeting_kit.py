"""Ranks of one process that meet in a page of memory, as those of one host do in the middle of a call."""

from __future__ import annotations

import mmap
import os
import struct
import time
from typing import Any

from compiled_kit import COMPILED

__all__ = ["meetings"]

_SAID = 7


class _Waiting:
    """An agreement of ranks that only wait."""

    def __init__(self, page: Any, words: bytearray) -> None:
        self._page, self._words = page, words

    def see_through(self, said: tuple[bytes, bytes], _deadline: float) -> bool:
        ends = time.monotonic() + 20.0
        while not self._page.test():
            if time.monotonic() > ends:
                raise TimeoutError("nobody comes")
            os.sched_yield()
        return bytes(self._words) == said[1]


def meetings(size: int, looks: int, more_bytes: int = 4096) -> tuple[list[Any], list[Any], list[memoryview]]:
    """The meeting of each rank, its page, and more memory that all share."""
    memory, made, pages = mmap.mmap(-1, 4096 + more_bytes), [], []
    said = struct.pack("=3Q", _SAID, 0, 0), struct.pack("=3Q", _SAID * size, 0, 0)
    for rank in range(size):
        words = bytearray(24)
        pages.append(COMPILED["Page"](memory, words, rank, size, looks))
        made.append(COMPILED["Meeting"](pages[rank], _Waiting(pages[rank], words), COMPILED["Guarded"](), said))
    return made, pages, [memoryview(memory)[4096:]] * size
