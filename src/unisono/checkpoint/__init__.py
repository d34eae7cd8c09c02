"""Checkpoints that all ranks write and read together, with every byte verified and without pickle.

un.checkpoint.save("runs/7/last", {"model": model, "optimizer": optimizer, "step": 7}, comm)
state = un.checkpoint.load("runs/7/last", {"model": model, "optimizer": optimizer, "step": 0}, comm)
"""

from typing import TYPE_CHECKING

from unisono.core.lazy import load_on_use

if TYPE_CHECKING:
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

__getattr__, __dir__ = load_on_use(
    __name__,
    {
        "unisono.checkpoint.archive": "Archive open_archive",
        "unisono.checkpoint.checkpointer": "Checkpointer",
        "unisono.checkpoint.collective": "SaveHandle",
        "unisono.checkpoint.conversion": "convert",
        "unisono.checkpoint.divergence": "assert_in_sync sync",
        "unisono.checkpoint.errors": (
            "CheckpointError CorruptError FormatError NoCheckpointError StateError StorageError"
        ),
        "unisono.checkpoint.loader": "load",
        "unisono.checkpoint.manifest": "Manifest",
        "unisono.checkpoint.saver": "async_save save",
        "unisono.checkpoint.storage": "Storage",
        "unisono.checkpoint.tree": "RNG PerRank",
        "unisono.checkpoint.verification": "latest verify",
        "unisono.core.tensor_shard": "TensorShard",
    },
)
