"""The number of objects that an object keeps alive: what it remembers, wherever it keeps it."""

from __future__ import annotations

import gc
import types

__all__ = ["reachable"]


def reachable(root: object) -> int:
    """Count an object, the objects that it holds, those that these hold, and so on; no classes and functions."""
    seen = {id(root): root}
    new = [root]
    while new:
        held = [each for each in gc.get_referents(*new) if not isinstance(each, type | types.FunctionType)]
        new = list({id(each): each for each in held if id(each) not in seen}.values())
        seen |= {id(each): each for each in new}
    return len(seen)
