"""Partitioning of datasets over ranks. Works with any communication library.

    sampler = un.data.PartitionSampler(dataset, comm)
    loader = DataLoader(dataset, batch_size=64, sampler=sampler)

Each partitioner is defined in its own file in `partitions`, and is looked up by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.data.batches import GlobalBatchSampler
from unisono.data.feistel import IndexShuffle
from unisono.data.indices import Indices
from unisono.data.metrics import gather_metrics, gather_samples
from unisono.data.partition import DataPartitioner, Partition
from unisono.data.partitioner import PARTITIONERS, Partitioner, apportion
from unisono.data.partitions.shuffled import Shuffled as shuffled
from unisono.data.sampler import EpochWarning, PartitionSampler
from unisono.data.shards import ShardPartition, read_lines
from unisono.data.stream import StreamPartition

# Only the default partitioner, `shuffled`, is imported above; others load on first use.
if TYPE_CHECKING:
    from unisono.data.partitions.balanced import Balanced as balanced
    from unisono.data.partitions.contiguous import Contiguous as contiguous
    from unisono.data.partitions.dirichlet import Dirichlet as dirichlet
    from unisono.data.partitions.grouped import Grouped as grouped
    from unisono.data.partitions.sampled import Sampled as sampled
    from unisono.data.partitions.stratified import Stratified as stratified
    from unisono.data.partitions.strided import Strided as strided
    from unisono.data.partitions.weighted import Weighted as weighted

__all__ = [
    "PARTITIONERS",
    "DataPartitioner",
    "EpochWarning",
    "GlobalBatchSampler",
    "IndexShuffle",
    "Indices",
    "Partition",
    "PartitionSampler",
    "Partitioner",
    "ShardPartition",
    "StreamPartition",
    "apportion",
    "balanced",
    "contiguous",
    "dirichlet",
    "gather_metrics",
    "gather_samples",
    "grouped",
    "read_lines",
    "sampled",
    "shuffled",
    "stratified",
    "strided",
    "weighted",
]

__getattr__, __dir__ = PARTITIONERS.attributes(__name__)
