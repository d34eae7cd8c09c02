"""What each call tells and asks, whatever it is: whether calls may still be made, and until when this one may take."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from unisono.compiled import compiled

__all__ = ["Guarded", "Turns"]


@compiled
class Guarded:
    """The part that is in haste; src/compiled/guarded.c does the same.

    Attributes:
        broken: Why nothing can be called any more, if so.
        deadline: On the monotonic clock, for `Watch`; None while no call is under way.
    """

    broken: BaseException | None = None
    deadline: float | None = None


class Turns(Guarded):
    """That, and who waits for whose calls to end.

    Attributes:
        lock: For the compiled classes: to be held while a call is made, if anything.
        turn: The same, always to be entered.
    """

    lock: Any = None
    turn: AbstractContextManager[Any] = nullcontext()
