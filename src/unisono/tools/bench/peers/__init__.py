"""Peers by name: other implementations of a collective, one file each, measured beside unisono in the same run."""

from __future__ import annotations

from unisono.core.registry import Registry
from unisono.tools.bench.peer import Peer

__all__ = ["PEERS"]

PEERS: Registry[type[Peer]] = Registry("peer", "unisono.tools.bench.peers", "PEER")
"""A new peer is one new file, or an entry point `unisono.tools.bench.peers` of another package."""
