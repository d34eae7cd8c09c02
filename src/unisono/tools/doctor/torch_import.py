"""Torch, for checks that run at the same time: two threads that import it at once break it."""

from __future__ import annotations

import threading
from types import ModuleType

__all__ = ["load_torch"]

_importing = threading.Lock()


def load_torch() -> ModuleType:
    """Import torch with what this package uses of it.

    Raises:
        ImportError, OSError: It cannot be imported; a library of it that is missing is an OSError.
    """
    with _importing:
        import torch
        import torch.distributed

        return torch
