"""Transports by name: from a file here, from entry points in `unisono.transports`, or from `TRANSPORTS.register`."""

from __future__ import annotations

from unisono.core.registry import Registry
from unisono.core.transport import Transport

__all__ = ["TRANSPORTS"]

TRANSPORTS: Registry[type[Transport]] = Registry(
    "transport",
    "unisono.transports",
    "TRANSPORT",
    # One package serves all backends of torch.distributed.
    aliases={"gloo": "torch", "nccl": "torch", "ucc": "torch", "xccl": "torch"},
    helpers=("hierarchical", "tagged_messages"),
)
