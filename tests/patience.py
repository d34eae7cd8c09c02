"""To wait for what nobody tells of: look again and again, but not for ever."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

__all__ = ["until"]

_LOOK_EVERY_S = 0.005


def until(condition: Callable[[], object], within_s: float = 20.0) -> bool:
    """Whether it has become true in time. What nobody holds is freed meanwhile, also where it stands in a circle."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        gc.collect()
        time.sleep(_LOOK_EVERY_S)
    return True
