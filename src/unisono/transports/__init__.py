"""Transports by name: a file here, an entry point `unisono.transports`, or what `TRANSPORTS.register` was given."""

from __future__ import annotations

from unisono.registry import Registry
from unisono.transport import Transport

__all__ = ["TRANSPORTS"]

TRANSPORTS: Registry[type[Transport]] = Registry(
    "transport",
    "unisono.transports",
    "TRANSPORT",
    # One file serves everything that torch.distributed has.
    aliases={"gloo": "torch", "nccl": "torch", "ucc": "torch", "xccl": "torch"},
)
