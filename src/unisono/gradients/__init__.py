"""Average gradients and share parameters, in flat buckets: by hooks, or by a call."""

from __future__ import annotations

from unisono.gradients.average import average_gradients, broadcast_parameters
from unisono.gradients.averager import GradientAverager

__all__ = ["GradientAverager", "average_gradients", "broadcast_parameters"]
