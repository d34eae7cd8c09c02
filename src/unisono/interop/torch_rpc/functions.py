"""`torch.distributed.rpc.functions`."""

from unisono.rpc import async_execution

__all__ = ["async_execution"]
