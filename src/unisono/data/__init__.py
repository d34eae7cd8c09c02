"""Which samples each rank trains on. Knows nothing of communication."""

from __future__ import annotations

from unisono.data.partition import DataPartitioner, Partition

__all__ = ["DataPartitioner", "Partition"]
