"""Checkpoints: every byte safe, written and read by all ranks, and no pickle anywhere.

un.checkpoint.save("runs/7/last", {"model": model, "optimizer": optimizer, "step": 7}, comm)
state = un.checkpoint.load("runs/7/last", {"model": model, "optimizer": optimizer, "step": 0}, comm)
"""

from __future__ import annotations

from unisono.checkpoint.archive import Archive, open_archive
from unisono.checkpoint.checkpointer import Checkpointer
from unisono.checkpoint.collective import SaveHandle
from unisono.checkpoint.conversion import convert
from unisono.checkpoint.divergence import assert_in_sync, sync
from unisono.checkpoint.errors import (
    CheckpointError,
    CorruptError,
    FormatError,
    NoCheckpointError,
    StateError,
    StorageError,
)
from unisono.checkpoint.loader import load
from unisono.checkpoint.manifest import Manifest
from unisono.checkpoint.saver import async_save, save
from unisono.checkpoint.storage import Storage
from unisono.checkpoint.tree import RNG, PerRank
from unisono.checkpoint.verification import latest, verify
from unisono.core.tensor_shard import TensorShard

__all__ = [
    "RNG",
    "Archive",
    "CheckpointError",
    "Checkpointer",
    "CorruptError",
    "FormatError",
    "Manifest",
    "NoCheckpointError",
    "PerRank",
    "SaveHandle",
    "StateError",
    "Storage",
    "StorageError",
    "TensorShard",
    "assert_in_sync",
    "async_save",
    "convert",
    "latest",
    "load",
    "open_archive",
    "save",
    "sync",
    "verify",
]
