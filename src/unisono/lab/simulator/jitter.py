"""Random delays that depend on the seed, the sender and the number of its message only, not on the order of events."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["exponential", "exponentials"]

_MASK = (1 << 64) - 1
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def exponential(seed: int, sender: int, number: int) -> float:
    """Return an exponentially distributed number with mean 1, by the hash splitmix64 (Steele et al., OOPSLA 2014).

    Example:
        >>> exponential(0, 1, 2) == exponential(0, 1, 2) != exponential(0, 1, 3)
        True
    """
    word = _mixed(_mixed(_mixed(seed) ^ sender) ^ number)
    return -math.log1p(-(word >> 11) * 2.0**-53)


def exponentials(seed: int, size: int, number: int) -> Any:
    """Return the same for all senders, as an array.

    Example:
        >>> round(float(exponentials(0, 4, 2)[1] - exponential(0, 1, 2)), 12)
        0.0
    """
    import numpy as np

    words = _mixed_array(_mixed_array(np.arange(size, dtype=np.uint64) ^ np.uint64(_mixed(seed))) ^ np.uint64(number))
    return -np.log1p(-(words >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mixed(word: int) -> int:
    word = (word + _STEP) & _MASK
    word = ((word ^ (word >> 30)) * _FIRST) & _MASK
    word = ((word ^ (word >> 27)) * _SECOND) & _MASK
    return word ^ (word >> 31)


def _mixed_array(words: Any) -> Any:
    import numpy as np

    words = words + np.uint64(_STEP)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_FIRST)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_SECOND)
    return words ^ (words >> np.uint64(31))
