"""Peers by name: other ways to do a collective, one file each, measured beside unisono in the same run."""

from __future__ import annotations

from unisono.bench.peer import Peer
from unisono.registry import Registry

__all__ = ["PEERS"]

PEERS: Registry[type[Peer]] = Registry("peer", "unisono.bench.peers", "PEER")
"""A new peer is one new file, or an entry point `unisono.bench.peers` of another package."""
