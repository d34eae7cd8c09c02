"""Filling: bytes from files into tensors, on all ranks of a host, with each byte coming from the disk once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from unisono.checkpoint.checksum import BLOCK
from unisono.checkpoint.dtypes import memory_of
from unisono.checkpoint.manifest import TensorEntry
from unisono.checkpoint.map_location import Destination, MapLocation
from unisono.checkpoint.reader import Block, Files, ReadWindow
from unisono.checkpoint.restore import Restorer, Wanted
from unisono.checkpoint.saver import Progress
from unisono.checkpoint.tensor_shard import TensorShard
from unisono.checkpoint.writer import ByteCallback

if TYPE_CHECKING:
    from unisono.communicator import Communicator

__all__ = ["LoadOptions", "TensorLoader"]

_STRETCH = 8
"""Windows that a rank reads from the disk before the others copy them from memory, which must hold 32 MiB."""


@dataclass(frozen=True)
class LoadOptions:
    """Arguments of `load`."""

    map_location: MapLocation = None
    strict: bool = True
    check: bool | Literal["first"] = True
    progress: Progress | None = None


class TensorLoader:
    """Loader of all bytes into their tensors.

    If the host's page cache keeps file contents, each rank reads all bytes that it needs straight into its tensors:
    first its own share from the disk, then, when the other ranks have read theirs, the other shares from memory.
    Otherwise each window is read by one rank, and broadcast to the others. In both cases the rank that reads a window
    from the disk checks it for all.

    Args:
        files: The files to read from.
        restoration: Receives the tensors.
        wanted: The tensors to load.
        host: The ranks of this host; None if this rank is alone.
        cached: Whether the host's memory keeps file contents; the same on all its ranks.
        same: Whether the other ranks of the host read the same files, so that their checks also hold here.
        options: Options of the load.
        on_bytes: Called with the number of bytes that are in place, of each window.
    """

    def __init__(
        self,
        files: Files,
        restoration: Restorer,
        wanted: Wanted,
        host: Communicator | None,
        options: LoadOptions,
        on_bytes: ByteCallback,
        *,
        cached: bool,
        same: bool,
    ) -> None:
        self._files, self._restoration, self._host, self._cached = files, restoration, host, cached
        self._wanted = wanted
        self._on_bytes = on_bytes
        self._check = bool(options.check)
        self._same = same
        self._destinations = {
            name: [Destination(restoration.entries[name], wanted.targets.get(name), options.map_location)]
            for name in wanted.needed
        }
        self._shards = [(shard, self._add_shard(name, shard)) for name, shard in wanted.shards]
        self._spare: dict[str, torch.Tensor] = {}
        self._bad: list[Block] = []
        self._failed: list[Exception] = []

    def run(self, shares: Sequence[Sequence[ReadWindow]], own: Sequence[ReadWindow]) -> None:
        """Load all tensors. Collective over the host's ranks.

        Args:
            shares: For each rank of the host the windows to read from the disk.
            own: Windows that only this rank needs.

        Raises:
            CorruptError: Damaged; all tensors concerned are named.
            OSError: The storage could not be read.
        """
        if self._host is None:
            self._attempt(self._read, shares[0])
        elif self._cached:
            self._through_memory(self._host, shares)
        else:
            self._by_broadcast(self._host, shares)
        self._attempt(self._read, own)
        self._files.corrupt_error(self._bad)
        if self._failed:
            raise self._failed[0]
        self._restoration.values.update({name: self._destinations[name][0].tensor() for name in self._wanted.needed})
        for shard, destination in self._shards:
            shard.local.copy_(destination.tensor())

    def _add_shard(self, name: str, shard: TensorShard) -> Destination:
        saved, local = self._restoration.entries[name].dtype, shard.local
        part = TensorEntry(saved, tuple(local.shape))
        destination = Destination(
            part, local if local.dtype == saved else None, local.device, shard.start * saved.itemsize
        )
        self._destinations.setdefault(name, []).append(destination)
        return destination

    def _attempt(self, step: Callable[..., None], *given: Any) -> None:
        """Run `step`, and keep its error until all ranks have finished: the others wait for this rank."""
        if self._failed:
            return
        try:
            step(*given)
        except Exception as error:
            self._failed.append(error)

    # -- straight into place -------------------------------------------------------------------
    def _through_memory(self, host: Communicator, shares: Sequence[Sequence[ReadWindow]]) -> None:
        mine = shares[host.rank]
        for low in range(0, max(map(len, shares)), _STRETCH):
            self._attempt(self._read, mine, low, low + _STRETCH)
            host.barrier()
            for turn in range(1, host.size):
                others = shares[(host.rank + turn) % host.size]
                self._attempt(self._read_into_place, others[low : low + _STRETCH], self._check and not self._same)

    def _read(self, windows: Sequence[ReadWindow], low: int = 0, high: int = sys.maxsize) -> None:
        """Read windows from the disk; prefetch the windows that follow."""
        for number in range(low, min(high, len(windows))):
            self._files.prefetch(windows, number)
            self._read_into_place(windows[number : number + 1], self._check)

    def _read_into_place(self, windows: Sequence[ReadWindow], check: bool) -> None:
        for window in windows:
            for block in window.blocks:
                # Headers, and tensors that only other ranks need, have no destination here.
                destinations = self._destinations.get(block.name or "", [])
                if destinations or (block.name is None and check):
                    self._put(block, destinations, check)
            self._on_bytes(window.stop - window.start)

    def _put(self, block: Block, destinations: Sequence[Destination], check: bool) -> None:
        length = block.stop - block.start
        memory = destinations[0].memory(block.offset, length) if len(destinations) == 1 else None
        self._fetch(block, memory if memory is not None else memory_of(self._scratch(length)), check)
        if memory is None:
            for destination in destinations:
                destination.put(block.offset, self._scratch(length))

    # -- by one rank, for all ------------------------------------------------------------------
    def _by_broadcast(self, host: Communicator, shares: Sequence[Sequence[ReadWindow]]) -> None:
        for number in range(max(map(len, shares))):
            current = [windows[number] if number < len(windows) else None for windows in shares]
            mine = current[host.rank]
            read = self._scratch(mine.stop - mine.start if mine else 0, "read")
            if mine is not None:
                self._attempt(self._load, shares[host.rank], number, memory_of(read))
            for reader, window in enumerate(current):
                if window is not None:
                    data = (read if reader == host.rank else self._scratch(window.stop - window.start)).to(host.device)
                    host.broadcast(data, reader)
                    self._attempt(self._spread, window, data)

    def _load(self, windows: Sequence[ReadWindow], number: int, memory: memoryview) -> None:
        self._files.prefetch(windows, number)
        window = windows[number]
        for block in window.blocks:
            self._fetch(block, memory[block.start - window.start : block.stop - window.start], self._check)

    def _spread(self, window: ReadWindow, data: torch.Tensor) -> None:
        for block in window.blocks:
            for destination in self._destinations.get(block.name or "", []):
                destination.put(block.offset, data[block.start - window.start : block.stop - window.start])
        self._on_bytes(window.stop - window.start)

    # -- both ----------------------------------------------------------------------------------
    def _fetch(self, block: Block, memory: memoryview, check: bool) -> None:
        if not self._files.read(block, memory, check=check):
            self._bad.append(block)

    def _scratch(self, length: int, use: str = "") -> torch.Tensor:
        spare = self._spare.get(use)
        if spare is None or spare.numel() < length:
            spare = self._spare[use] = torch.empty(max(length, BLOCK), dtype=torch.uint8)
        return spare[:length]
