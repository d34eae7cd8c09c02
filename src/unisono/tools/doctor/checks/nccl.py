"""Check that torch can use NCCL if this host has GPUs."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from unisono.tools.doctor.checks.torch import load_torch
from unisono.tools.doctor.examination import Finding, Target, info, ok, problem

__all__ = ["ORDER", "check"]

ORDER = 21


def check(target: Target) -> Iterator[Finding]:
    """Ask torch whether NCCL is available. A missing GPU is a problem only if NCCL was requested."""
    if not target.wants("nccl"):
        return
    torch = load_torch()
    dist = torch.distributed
    count = torch.cuda.device_count()
    if not count:
        text = "torch sees no GPU here"
        if target.requires("nccl"):
            yield problem(f"{text}, and nccl needs one for each rank", "unisono doctor --backend gloo")
        else:
            yield info(f"{text}, so it is not needed")
    elif dist.is_available() and dist.is_nccl_available():
        yield ok(f"{'.'.join(map(str, torch.cuda.nccl.version()))}, for {count} GPU(s)")
    else:
        yield problem(
            f"there are {count} GPU(s), but this torch was built without NCCL",
            f"{sys.executable} -m pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu128",
        )
