"""Waits that end: for what nobody tells of, and for several calls at once."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

__all__ = ["together", "until"]

_LOOK_EVERY_S = 0.005


def until(condition: Callable[[], object], within_s: float = 20.0) -> bool:
    """Whether it has become true in time. What nobody holds is freed meanwhile, also where it stands in a circle."""
    began = now = time.monotonic()
    collect_at = began
    while not condition():
        if now > began + within_s:
            return False
        if now >= collect_at:
            # It takes longer than a look: after twice the time each time.
            gc.collect()
            collect_at = now + (now - began)
        time.sleep(_LOOK_EVERY_S)
        now = time.monotonic()
    return True


def together(*calls: Callable[[], Any], within_s: float = 40.0) -> list[Any]:
    """What each call returned or raised, all of them at the same time."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(within_s) for future in [pool.submit(outcome, call) for call in calls]]
