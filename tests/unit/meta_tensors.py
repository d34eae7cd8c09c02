"""A tensor whose elements are elsewhere, as a DTensor's are."""

from __future__ import annotations

from typing import Any

import torch


class Hollow(torch.Tensor):
    """It has a shape and a dtype, and no memory of its own."""

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Hollow:
        made: Hollow = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError
