"""torch's store on top of the control plane, so that torch's own process groups need no TCPStore."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from unisono.control.base import Control

__all__ = ["ControlStore"]


class ControlStore(dist.Store):
    """A `torch.distributed.Store` whose keys live under a prefix of a control plane.

    Args:
        control: The handle; it outlives the store.
        prefix: What the names of all keys begin with. Stores with different ones know nothing of each other.
        timeout_s: Seconds that `get` and `wait` wait for a key.

    Example:
        >>> from unisono.control import LocalHub
        >>> store = ControlStore(LocalHub().control(), "gloo/world")
        >>> store.set("host", "here")
        >>> store.get("host")
        b'here'
    """

    def __init__(self, control: Control, prefix: str, timeout_s: float = 300.0) -> None:
        super().__init__()
        self._control, self._prefix, self._timeout_s = control, prefix, timeout_s

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"
