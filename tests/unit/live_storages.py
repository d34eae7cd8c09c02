"""Bytes of the storages of tensors that are alive."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LiveStorages"]


class LiveStorages(TorchDispatchMode):
    """Counts the memory of all tensors that operations in it return, also after they were resized.

    A storage counts if its first tensor is of a floating-point dtype: memory of a transport is of bytes.

    Attributes:
        peak: Largest number of bytes since `restart`, after any operation.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._known: dict[StorageWeakRef, bool] = {}
        self._see(tensors)
        self.restart()

    def _see(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            # Its memory is no other storage's while there is a reference.
            self._known.setdefault(StorageWeakRef(tensor.untyped_storage()), tensor.is_floating_point())

    def now(self) -> int:
        self._known = {ref: counts for ref, counts in self._known.items() if not ref.expired()}
        alive = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref, counts in self._known.items() if counts]
        return sum(storage.nbytes() for storage in alive if storage is not None)

    def restart(self) -> None:
        self.peak = self.now()

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._see(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        self.peak = max(self.peak, self.now())
        return result
