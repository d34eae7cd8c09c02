"""Check that torch is installed, and new enough."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import ModuleType

from unisono.tools.doctor.examination import Finding, Target, ok, problem

__all__ = ["ORDER", "check", "load_torch"]

ORDER = 10
_OLDEST = (2, 8)
# Checks run in threads, and simultaneous imports by two of them break torch.
_importing = threading.Lock()


def check(_target: Target) -> Iterator[Finding]:
    """Import torch."""
    fix = f"{sys.executable} -m pip install --upgrade 'torch>={_OLDEST[0]}.{_OLDEST[1]}'"
    try:
        torch = load_torch()
    except (ImportError, OSError) as error:
        yield problem(f"torch cannot be imported: {error}", fix)
        return
    version = torch.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        yield problem(f"torch {version} is too old; use {_OLDEST[0]}.{_OLDEST[1]} or later", fix)
        return
    count = torch.cuda.device_count()
    gpus = f"{count} x {torch.cuda.get_device_name(0)}" if count else "no GPU"
    yield ok(f"{version}, {gpus}, {torch.get_num_threads()} threads a process")


def load_torch() -> ModuleType:
    """Import torch with the submodules that this package uses.

    Raises:
        ImportError, OSError: Torch cannot be imported; a missing library of torch is an OSError.
    """
    with _importing:
        import torch
        import torch.distributed

        return torch
