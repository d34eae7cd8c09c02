"""Average gradients and share parameters, in flat buckets: by hooks, by a call, or not at every step."""

from __future__ import annotations

from unisono.gradients.average import average_gradients, broadcast_parameters
from unisono.gradients.averager import GradientAverager
from unisono.gradients.gossip import Gossip
from unisono.gradients.guards import DivergenceGuard, NanGuard, agree_step, assert_finite
from unisono.gradients.local_sgd import DiLoCo, LocalSGD, SlowMo
from unisono.gradients.logical_shards import LogicalShards
from unisono.gradients.periodic import every
from unisono.gradients.periodic_averager import PeriodicAverager
from unisono.gradients.robust import ClippedMean, TrimmedMean
from unisono.gradients.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm
from unisono.utils.flatten import plan_buckets

__all__ = [
    "ClippedMean",
    "DiLoCo",
    "DivergenceGuard",
    "Gossip",
    "GradientAverager",
    "LocalSGD",
    "LogicalShards",
    "NanGuard",
    "PeriodicAverager",
    "SlowMo",
    "SyncBatchNorm",
    "TrimmedMean",
    "agree_step",
    "assert_finite",
    "average_gradients",
    "broadcast_parameters",
    "convert_sync_batchnorm",
    "every",
    "plan_buckets",
]
