"""Transports by name: a file here, an entry point `unisono.transports`, or what `TRANSPORTS.register` was given."""

from __future__ import annotations

from unisono.core.registry import Registry
from unisono.core.transport import Transport

__all__ = ["TRANSPORTS"]

TRANSPORTS: Registry[type[Transport]] = Registry(
    "transport",
    "unisono.transports",
    "TRANSPORT",
    # One package serves everything that torch.distributed has.
    aliases={"gloo": "torch", "nccl": "torch", "ucc": "torch", "xccl": "torch"},
    helpers=("hierarchical", "mailbox"),
)
