"""The search for dtypes that can be reduced, with modes of users around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from unisono.core import tensors
from unisono.core.types import ReduceOp


class DispatchRefuses(TorchDispatchMode):
    """Lets nothing be computed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("refused")


class FunctionRefuses(TorchFunctionMode):
    """Lets nothing be called."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("refused")


@pytest.mark.parametrize("mode", [DispatchRefuses, FunctionRefuses])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MAX])
def test_user_modes_have_no_effect(op: ReduceOp, mode: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_known", set(), raising=False)
    with mode():
        tensors.check_reducible(op, torch.int32)
    tensors.check_reducible(op, torch.int32)


def test_failure_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_known", set(), raising=False)

    def fails(*_: torch.Tensor, **__: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as broken:
        broken.setitem(tensors.COMBINE, ReduceOp.SUM, fails)
        with pytest.raises(ValueError, match="does not support sum on"):
            tensors.check_reducible(ReduceOp.SUM, torch.int32)
    tensors.check_reducible(ReduceOp.SUM, torch.int32)
    with pytest.raises(ValueError, match="does not support bor on"):
        tensors.check_reducible(ReduceOp.BOR, torch.float32)
