"""`torch.distributed.rpc.functions`."""

from __future__ import annotations

from unisono.rpc import async_execution

__all__ = ["async_execution"]
