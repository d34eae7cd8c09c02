"""Task pool whose workers are ranks, with futures and `map` as in `concurrent.futures`."""

from unisono.pool.executor import Pool
from unisono.pool.scheduler import BrokenPoolError

__all__ = ["BrokenPoolError", "Pool"]
