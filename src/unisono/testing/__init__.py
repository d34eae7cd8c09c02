"""Test tools for code built on unisono: ranks, conformance checks, strategies, reference results, partition checks.

    class TestMine(un.testing.TransportConformance):
        backend = "mine"

The extra `testing` installs the packages needed to use pytest and Hypothesis. Submodules are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.testing import (
        cases,
        codecs,
        conformance,
        gradients,
        memory_layouts,
        partitioners,
        reference,
        samplers,
        strategies,
    )
    from unisono.testing.conformance import TransportConformance, World
    from unisono.testing.marked_ranks import torch_ranks
    from unisono.testing.namespaced_ranks import Network, run_ranks
    from unisono.testing.pools import RankPool, pool
    from unisono.wrappers.checksum import Checksummed
    from unisono.wrappers.delay import Delayed
    from unisono.wrappers.fault import Faulty, KilledError
    from unisono.wrappers.rank_faults import RankFaults

__all__ = [
    "Checksummed",
    "Delayed",
    "Faulty",
    "KilledError",
    "Network",
    "RankFaults",
    "RankPool",
    "TransportConformance",
    "World",
    "cases",
    "chaos",
    "codecs",
    "conformance",
    "gradients",
    "memory_layouts",
    "partitioners",
    "pool",
    "reference",
    "run_ranks",
    "samplers",
    "strategies",
    "torch_ranks",
]

_HOME = {
    "Checksummed": "unisono.wrappers.checksum",
    "Delayed": "unisono.wrappers.delay",
    "Faulty": "unisono.wrappers.fault",
    "RankFaults": "unisono.wrappers.rank_faults",
    "KilledError": "unisono.wrappers.fault",
    "Network": "unisono.testing.namespaced_ranks",
    "RankPool": "unisono.testing.pools",
    "TransportConformance": "unisono.testing.conformance",
    "World": "unisono.testing.conformance",
    "pool": "unisono.testing.pools",
    "run_ranks": "unisono.testing.namespaced_ranks",
    "torch_ranks": "unisono.testing.marked_ranks",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in __all__:
        return importlib.import_module(f"unisono.testing.{name}")
    raise AttributeError(f"module 'unisono.testing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
