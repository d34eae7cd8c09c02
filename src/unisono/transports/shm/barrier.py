"""Places of what Python reads and writes of the core's barrier: as in src/native/shm/barrier.hpp."""

from __future__ import annotations

__all__ = ["LEFT", "NBYTES", "STRIDE"]

NBYTES = 256
"""Bytes of a rank."""
STRIDE = NBYTES // 8
"""Words of a rank; the first is the number of its last round."""
LEFT = 2
"""Whether a rank has left."""
