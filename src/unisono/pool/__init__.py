"""Tasks for idle ranks: futures and `map`, as `concurrent.futures` has them."""

from __future__ import annotations

from unisono.pool.executor import Pool
from unisono.pool.scheduler import BrokenPoolError

__all__ = ["BrokenPoolError", "Pool"]
