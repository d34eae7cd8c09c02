"""Transports by name: one file each here, entry points `unisono.transports` of other packages, or `TRANSPORTS.register`."""

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
