"""Thread-safe import of torch for concurrent checks: simultaneous imports by two threads break it."""

from __future__ import annotations

import threading
from types import ModuleType

__all__ = ["load_torch"]

_importing = threading.Lock()


def load_torch() -> ModuleType:
    """Import torch with the submodules that this package uses.

    Raises:
        ImportError, OSError: Torch cannot be imported; a missing library of torch is an OSError.
    """
    with _importing:
        import torch
        import torch.distributed

        return torch
