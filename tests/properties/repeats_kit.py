"""What the tests of repeated calls and of letters have in common: what these stand on, and how tensors may change."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

import unisono as un

__all__ = ["HOW", "changed", "repeats_of"]

HOW = ["grown", "moved", "turned", "shaped", "strided", "spread", "of another kind", "as it was", "grad", "another"]
HOW += ["opposite", "longer list", "nothing"]


class Agreement:
    def __init__(self, log: list[Any]) -> None:
        self.log, self.counted, self.outcome = log, 0, True

    def reach(self, said: Any, deadline: float, count: int = 0) -> bool:
        self.log.append(("reach", said, deadline))
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


def repeats_of(kinds: dict[str, Any], log: list[Any], lock: Any) -> Any:
    class Comms(kinds["Guarded"]):  # type: ignore[misc]  # whichever it is
        turn = lock or nullcontext()

        def __init__(self) -> None:
            self.lock, self.broken = lock, None

    class Repeats(kinds["Repeats"]):  # type: ignore[misc]  # whichever it is
        def __init__(self) -> None:
            self.comms, self.agreement = Comms(), Agreement(log)
            super().__init__(self.agreement, self.comms)

        def _anew(self, *given: Any) -> bool:
            log.append(("anew", given[0], given[3:]))
            return False

        def _unlike(self, *given: Any) -> bool:
            log.append(("unlike", given[0], given[3:]))
            return True

        def _explained(self, error: BaseException) -> BaseException:
            told = un.errors.CommError("explained") if isinstance(error, KeyError) else error
            if told is not error:
                told.__cause__ = error
            return told

        def _divided(self, target: Any) -> bool:
            log.append("divided")
            return True

    return Repeats()


def changed(tensor: torch.Tensor, base: torch.Tensor, how: str) -> torch.Tensor:
    """The tensor, or another one in its place, after what may happen to a tensor of the first six of its base."""
    now = {
        "grown": lambda: base[:8],
        "moved": lambda: base[6:],
        "turned": lambda: base[:6].view(3, 2).t(),
        "shaped": lambda: base[:6].view(1, 6, 1),
        "strided": lambda: torch.as_strided(base, (1, 2, 3), (7, 3, 1)),
        "spread": lambda: torch.as_strided(base, (6,), (2,)),
        "of another kind": lambda: base[:6].view(torch.int32 if base.dtype is torch.float32 else torch.float64),
        "as it was": lambda: base[:6],
        "opposite": lambda: torch._neg_view(base[:6]) if base.is_floating_point() else base[:6],
    }
    if how == "grad" and tensor.is_floating_point():
        tensor.requires_grad_(not tensor.requires_grad)
    elif how == "another":
        return base[:6]
    elif how in now and not tensor.requires_grad:
        tensor.data = now[how]()
    return tensor
