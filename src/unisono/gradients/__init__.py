"""Average gradients and share parameters, in flat buckets."""

from __future__ import annotations

from unisono.gradients.average import average_gradients, broadcast_parameters

__all__ = ["average_gradients", "broadcast_parameters"]
