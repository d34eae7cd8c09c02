"""Registry of transports by name, filled from this package, entry points and `TRANSPORTS.register`."""

from __future__ import annotations

from unisono.core.registry import Registry
from unisono.core.transport import Transport

__all__ = ["TRANSPORTS"]

TRANSPORTS: Registry[type[Transport]] = Registry(
    "transport",
    "unisono.transports",
    "TRANSPORT",
    # The package `unisono.transports.torch` implements all backends of torch.distributed.
    aliases={"gloo": "torch", "nccl": "torch", "ucc": "torch", "xccl": "torch"},
    helpers=("hierarchical", "tagged_messages"),
)
