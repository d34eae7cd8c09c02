"""Test tools for code built on unisono: ranks, conformance checks, strategies, reference results, partition checks.

    class TestMine(un.testing.TransportConformance):
        backend = "mine"

The extra `testing` installs the packages needed to use pytest and Hypothesis. Submodules are imported on first use.
"""

from typing import TYPE_CHECKING

from unisono.core.lazy import load_on_use

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

__getattr__, __dir__ = load_on_use(
    __name__,
    {
        "unisono.testing.conformance": "TransportConformance World",
        "unisono.testing.marked_ranks": "torch_ranks",
        "unisono.testing.namespaced_ranks": "Network run_ranks",
        "unisono.testing.pools": "RankPool pool",
        "unisono.wrappers.checksum": "Checksummed",
        "unisono.wrappers.delay": "Delayed",
        "unisono.wrappers.fault": "Faulty KilledError",
        "unisono.wrappers.rank_faults": "RankFaults",
    },
    [
        "unisono.testing.cases",
        "unisono.testing.chaos",
        "unisono.testing.codecs",
        "unisono.testing.conformance",
        "unisono.testing.gradients",
        "unisono.testing.memory_layouts",
        "unisono.testing.partitioners",
        "unisono.testing.reference",
        "unisono.testing.samplers",
        "unisono.testing.strategies",
    ],
)
