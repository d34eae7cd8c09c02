"""A checkpoint opened for reading, whose tensors are read on access."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from unisono.checkpoint.collective import CollectiveScope
from unisono.checkpoint.errors import CheckpointError
from unisono.checkpoint.loader import MapLocation, device_for
from unisono.checkpoint.manifest import Manifest, TensorEntry, digest
from unisono.checkpoint.reader import Block, Files, read_manifest, windows_of
from unisono.checkpoint.restore import Restorer, remapped_rank
from unisono.checkpoint.storage import Storage, storage_at
from unisono.checkpoint.tree import memory_of
from unisono.core.closing import Closing

__all__ = ["Archive", "open_archive"]


class Archive(Mapping[str, torch.Tensor], Closing):
    """Mapping of names to tensors, each read and checked on first access.

    On a local file system, a tensor stored contiguously is a private (copy-on-write) mapping of the file: nothing is
    copied, and writes to the tensor do not reach the file. Tensors remain valid after `close`.

    Access raises `KeyError` for an unknown name and `CorruptError` for a damaged tensor.

    Args:
        storage: The `Storage` object for the checkpoint's directory.
        map_location, check: As for `open_archive`.

    Attributes:
        manifest: The checkpoint's metadata, such as dtypes and shapes (`manifest.tensors`).

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp()
        >>> un.checkpoint.save(path, {"w": torch.arange(3)})
        >>> archive: Archive = un.checkpoint.open_archive(path)
        >>> "w" in archive, archive.manifest.tensors["w"].shape
        (True, (3,))
        >>> archive.close()
    """

    def __init__(self, storage: Storage, map_location: MapLocation, check: bool) -> None:
        self.manifest: Manifest = read_manifest(storage)[0]
        self.manifest.check_sizes(storage.sizes())
        self._files = Files(storage, self.manifest)
        self._where = storage.where
        self._map_location = map_location
        self._check = check

    def __getitem__(self, name: str) -> torch.Tensor:
        entry = self.manifest.tensors[name]
        try:
            tensor = self._mapped(name, entry) if len(entry.pieces) == 1 else self._joined(name, entry)
        except CheckpointError as error:
            error.path = self._where
            raise
        return tensor.to(device_for(entry.device, self._map_location))

    def _mapped(self, name: str, entry: TensorEntry) -> torch.Tensor:
        piece = entry.pieces[0]
        if piece.start == piece.stop:
            return torch.empty(0, dtype=torch.uint8).view(entry.dtype).view(entry.shape)
        view = self._files.open(piece.file).view(piece.start, piece.stop)
        if self._check:
            bad = [block for block, part in self._parts(name, view) if digest(part) != block.digest]
            self._files.corrupt_error(bad)
        return torch.frombuffer(view, dtype=torch.uint8).view(entry.dtype).view(entry.shape)

    def _joined(self, name: str, entry: TensorEntry) -> torch.Tensor:
        flat = torch.empty(entry.nbytes, dtype=torch.uint8)
        parts = self._parts(name, memory_of(flat))
        bad = [block for block, part in parts if not self._files.read(block, part, check=self._check)]
        self._files.corrupt_error(bad)
        return flat.view(entry.dtype).view(entry.shape)

    def _parts(self, name: str, memory: memoryview) -> Iterator[tuple[Block, memoryview]]:
        """Yield each block of a tensor, and its place in the memory of the whole tensor."""
        for window in windows_of(self.manifest, [name]):
            for block in window.blocks:
                if block.name is not None:
                    yield block, memory[block.offset : block.offset + block.stop - block.start]

    def state(self, rank: int = 0) -> Any:
        """Return the whole state of one rank as plain values, with dicts in place of objects.

        Args:
            rank: Rank whose per-rank values are returned; less than `manifest.ranks`.

        Raises:
            CorruptError: A tensor is damaged.
            ValueError: `rank` is not one of the ranks that saved the checkpoint.

        Cost: reads all tensors of the state once.

        Example:
            >>> import tempfile
            >>> path = tempfile.mkdtemp()
            >>> un.checkpoint.save(path, {"model": torch.nn.Linear(1, 1, bias=False).requires_grad_(False), "step": 7})
            >>> with un.checkpoint.open_archive(path) as archive:
            ...     list(archive.state()["model"]), archive.state(rank=0)["step"]
            (['weight'], 7)
        """
        if not 0 <= rank < self.manifest.ranks:
            raise ValueError(f"rank={rank} did not save this checkpoint: its ranks are 0 to {self.manifest.ranks - 1}")
        source = remapped_rank(self.manifest.per_rank, rank, self.manifest.ranks)
        restoration = Restorer(self.manifest.tensors, source)
        build = restoration.match(None, self.manifest.state)
        restoration.values.update({name: self[name] for name in restoration.late.needed})
        return build()

    def __contains__(self, name: object) -> bool:
        return name in self.manifest.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.manifest.tensors)

    def __len__(self) -> int:
        return len(self.manifest.tensors)

    def close(self) -> None:
        """Close the files. Tensors remain valid."""
        self._files.close()


def open_archive(
    path: str | os.PathLike[str] | Storage, *, map_location: MapLocation = None, check: bool = True
) -> Archive:
    """Open a checkpoint to read individual tensors; other tensors are not read.

    Args:
        path: The checkpoint's path.
        map_location: Device of the tensors, as for `load`; the CPU if None.
        check: Whether to compare each tensor with its digest when it is read.

    Returns:
        A mapping of names to tensors, which is also a context manager that closes its files.

    Raises:
        NoCheckpointError, CorruptError, FormatError, StorageError: As for `load`.

    Cost: reads the manifest. The first access to each tensor reads its bytes once, to check them.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp()
        >>> un.checkpoint.save(path, {"w": torch.arange(3), "b": torch.zeros(2)})
        >>> with un.checkpoint.open_archive(path) as archive:
        ...     sorted(archive), archive["w"]
        (['b', 'w'], tensor([0, 1, 2]))
    """
    storage = storage_at(path)
    scope = CollectiveScope(None, "open", storage.where)
    archive: Archive = scope.first(lambda: Archive(storage, map_location, check))
    return archive
