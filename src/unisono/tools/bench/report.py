"""Results as JSON, with a description of the machine."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

import unisono as un
from unisono.tools.bench.memory import cache_bytes
from unisono.tools.bench.result import Result
from unisono.tools.bench.settings import Settings

__all__ = ["as_json", "machine"]


def machine() -> dict[str, Any]:
    """Describe this machine and its versions."""
    return {
        "unisono": un.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor(),
        "processors": os.cpu_count(),
        "cache_bytes": cache_bytes(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (text.partition(":")[2].strip() for text in lines if text.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def as_json(settings: Settings, results: list[Result]) -> dict[str, Any]:
    """Return `machine`, `settings`, and `results`, as their `plain()` return."""
    return {"machine": machine(), "settings": settings.plain(), "results": [result.plain() for result in results]}
