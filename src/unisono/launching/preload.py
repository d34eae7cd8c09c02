"""What a forkserver has in memory before the first rank starts: all that ranks would import slowly."""

from __future__ import annotations

import unisono
import unisono.control.client
import unisono.launching.rank
import unisono.transports.thread
import unisono.transports.torch

__all__ = ["unisono"]
