"""Check that torch is installed, and new enough."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from unisono.tools.doctor.finding import Finding, ok, problem
from unisono.tools.doctor.target import Target
from unisono.tools.doctor.torch_import import load_torch

__all__ = ["ORDER", "check"]

ORDER = 10
_OLDEST = (2, 8)


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
        yield problem(f"torch {version} is too old; {_OLDEST[0]}.{_OLDEST[1]} and later work", fix)
        return
    count = torch.cuda.device_count()
    gpus = f"{count} x {torch.cuda.get_device_name(0)}" if count else "no GPU"
    yield ok(f"{version}, {gpus}, {torch.get_num_threads()} threads a process")
