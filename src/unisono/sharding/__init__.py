"""Sharded training: optimizer states, gradients and parameters divided among the ranks."""

from unisono.sharding.model import ShardedModel
from unisono.sharding.optimizer import ShardedOptimizer

__all__ = ["ShardedModel", "ShardedOptimizer"]
