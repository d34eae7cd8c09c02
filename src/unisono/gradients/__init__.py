"""Gradient averaging and parameter sharing in flat buckets: with hooks, in one function call, or every few steps."""

from typing import TYPE_CHECKING

from unisono.core.lazy import load_on_use

if TYPE_CHECKING:
    from unisono.gradients.anchor import OuterUpdate
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
    "OuterUpdate",
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

__getattr__, __dir__ = load_on_use(
    __name__,
    {
        "unisono.gradients.anchor": "OuterUpdate",
        "unisono.gradients.average": "average_gradients broadcast_parameters",
        "unisono.gradients.averager": "GradientAverager",
        "unisono.gradients.gossip": "Gossip",
        "unisono.gradients.guards": "DivergenceGuard NanGuard agree_step assert_finite",
        "unisono.gradients.local_sgd": "DiLoCo LocalSGD SlowMo",
        "unisono.gradients.logical_shards": "LogicalShards",
        "unisono.gradients.periodic": "every",
        "unisono.gradients.periodic_averager": "PeriodicAverager",
        "unisono.gradients.robust": "ClippedMean TrimmedMean",
        "unisono.gradients.sync_batch_norm": "SyncBatchNorm convert_sync_batchnorm",
        "unisono.utils.flatten": "plan_buckets",
    },
)
