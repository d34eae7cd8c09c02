"""Loads a checkpoint on all ranks: checks that it is complete and fits the state, and only then changes the state."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch

from unisono.checkpoint.collective import CollectiveScope, finish_earlier
from unisono.checkpoint.errors import CheckpointError, CorruptError, StateError
from unisono.checkpoint.manifest import BLOCK, HELD, Manifest, TensorEntry
from unisono.checkpoint.reader import (
    Block,
    ByteRanges,
    Files,
    ReadWindow,
    assign,
    read_manifest,
    windows_of,
)
from unisono.checkpoint.restore import Restorer, Wanted, remapped_rank
from unisono.checkpoint.saver import Progress, progress_counter
from unisono.checkpoint.storage import Storage, storage_at
from unisono.checkpoint.tree import as_bytes, memory_of
from unisono.checkpoint.verification import last_good
from unisono.core.tensor_shard import TensorShard
from unisono.core.types import Timeout

if TYPE_CHECKING:
    from unisono.communicator import Communicator

__all__ = [
    "Destination",
    "LoadOptions",
    "MapLocation",
    "TensorLoader",
    "check_location",
    "device_for",
    "load",
    "load_state",
    "ranks_of_host",
]

MapLocation = str | torch.device | Mapping[str, str] | Callable[[Any, str], Any] | None

_ATTEMPTS = 20
"""Number of attempts while another process replaces the files: a writer may save every millisecond."""
_SMALL = HELD
"""If a rank reads at most this many bytes, all of them are checked before anything is changed."""


def load(
    path: str | os.PathLike[str] | Storage,
    state: Any = None,
    comm: Communicator | None = None,
    map_location: MapLocation = None,
    *,
    strict: bool = True,
    check: bool | Literal["first"] = True,
    timeout: Timeout | None = None,
    progress: Progress | None = None,
) -> Any:
    """Load a checkpoint into a state, in place, and return the state.

    Collective. The number of ranks may differ from the number of ranks that saved the checkpoint. Nothing is changed
    until it is certain that the checkpoint fits the state, that all files exist, and that objects whose states take up
    to 64 MiB accept these states. Optimizer states are assigned to the parameters with the same names. Custom loading
    logic in modules, such as `load_state_dict` hooks, runs as in torch.

    Each host reads every byte from the disk once: each rank reads a share, and copies the other shares from the page
    cache. For storage without a page cache, such as `s3://...`, the ranks broadcast their shares.

    Args:
        path: The path or storage that was passed to `save`.
        state: State to fill, with the structure that was saved; saved dict entries that the state lacks are not read.
            Tensors, modules and objects are updated in place; numbers and strings are replaced in their dict or list.
            If `state` is None, the whole saved state is created, with dicts in place of objects. For a `TensorShard`,
            only the blocks of 4 MiB that contain its elements are read.
        comm: The ranks that load together; None for this process alone.
        map_location: Device for created tensors: a device, a dict from saved devices to new devices, or a function, as
            for `torch.load`, except that None means the CPU. Tensors that `state` already contains remain on their
            devices.
        strict: Whether a name that exists only in the module or only in the checkpoint is an error.
        check: Whether to compare all bytes with their digests as they are read. "first" compares the bytes in a
            separate pass, before anything is changed; True does so only on ranks that read at most 4 MiB. Without a
            separate pass, some tensors of the state may already be overwritten when damage is found, and the error says
            so.
        timeout: As for `save`.
        progress: Called with the number of bytes loaded and the total.

    Returns:
        `state` itself if it is a dict, list, tensor or object; else a new value.

    Raises:
        NoCheckpointError: No checkpoint exists, or only an unfinished save.
        CorruptError: The checkpoint is damaged; the error names the tensors, and the last good checkpoint in the parent
            directory.
        FormatError: The checkpoint has a format that this version of unisono cannot read.
        StateError: The checkpoint belongs to a different model (names are missing or unexpected, shapes differ, or
            converting the dtype would change values), or an object rejects its state. Notes on the error describe any
            changes made to the state.
        StorageError: The storage cannot be read.
        TypeError, ValueError: `map_location` is invalid.

    If the number of ranks is unchanged, rank r loads the per-rank values of rank r. If a different number of ranks, p,
    saved the checkpoint, rank r loads the per-rank values of rank r mod p; random generators on ranks p and above
    remain unchanged (see `PerRank`).

    Cost: each host reads each byte from the disk once, if its memory can hold 32 MiB per rank; each rank copies each
    byte once, straight into its tensor, and hashes it there.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp()
        >>> un.checkpoint.save(path, {"w": torch.ones(2), "epoch": 3})
        >>> un.checkpoint.load(path, {"w": torch.zeros(2)})
        {'w': tensor([1., 1.])}
    """
    storage = storage_at(path)
    finish_earlier(storage.where, comm, raises=False)
    scope = CollectiveScope(comm, "load", storage.where, timeout)
    try:
        return load_state(storage, state, scope, LoadOptions(map_location, strict, check, progress))
    except StateError:
        raise
    except CheckpointError as error:
        good = scope.first(lambda: last_good(storage))
        error.add_note(
            f"the last good checkpoint beside it is {good}" if good else "there is no other good checkpoint beside it"
        )
        raise


def load_state(storage: Storage, state: Any, scope: CollectiveScope, options: LoadOptions) -> Any:
    """Implement `load`; retry if a concurrent save under the same name removes the files. Collective."""
    for attempt in range(_ATTEMPTS):
        manifest = _manifest(storage, scope)
        try:
            return _load(storage, manifest, state, scope, options)
        except CorruptError:
            if attempt == _ATTEMPTS - 1 or scope.first(lambda: read_manifest(storage)[0].id) == manifest.id:
                raise
    raise AssertionError("unreachable")


def _manifest(storage: Storage, scope: CollectiveScope) -> Manifest:
    """Read the manifest on rank 0, for all ranks."""
    mine: list[Manifest] = []

    def read() -> Any:
        manifest, data = read_manifest(storage)
        mine.append(manifest)
        return data.decode("ascii"), manifest.nbytes

    text, nbytes = scope.first(read)
    return mine[0] if mine else Manifest.from_bytes(text.encode("ascii"), nbytes)


@dataclass
class _Pass:
    """One pass of reading: its tensors, the windows that the host's ranks share, and the windows for this rank only."""

    wanted: Wanted
    shares: list[list[ReadWindow]]
    alone: list[ReadWindow]

    @property
    def nbytes(self) -> int:
        return sum([window.stop - window.start for windows in (*self.shares, self.alone) for window in windows])


def _load(storage: Storage, manifest: Manifest, state: Any, scope: CollectiveScope, options: LoadOptions) -> Any:
    source = remapped_rank(manifest.per_rank, scope.rank, scope.size)
    restoration = Restorer(manifest.tensors, source, strict=options.strict)
    builds: list[Callable[[], Any]] = []

    def match() -> tuple[list[list[str]], bool]:
        check_location(options.map_location)
        builds.append(restoration.match(state, manifest.state))
        needed = [list(restoration.early.needed), list(restoration.late.needed)]
        absent = [name for name in chain(*needed) if name not in manifest.tensors]
        if absent:
            raise StateError(f"its state refers to {absent[0]!r}, which it does not have")
        return needed, bool(restoration.parts)

    # A step of its own: matching calls `state_dict` of the user's objects, which may be collective.
    scope.first(lambda: manifest.check_sizes(storage.sizes()))
    found, loads_early = zip(*scope.all_or_none(match), strict=True)
    host = ranks_of_host(scope.comm)
    try:
        rank, size = (host.rank, host.size) if host is not None else (0, 1)
        early, late = (
            _pass(manifest, restoration, wanted, {*chain(*[names[number] for names in found])}, size)
            for number, wanted in enumerate((restoration.early, restoration.late))
        )
        on_bytes = progress_counter(options.progress, early.nbytes + late.nbytes)
        passes = [early, late] if any(names[0] for names in found) else [late]
        with Files(storage, manifest) as files, torch.no_grad():
            # Prepare on all ranks or none: creating tensors fails on a rank that lacks the memory or the device.
            loaders: list[TensorLoader] = []

            def prepare() -> Any:
                checked = [_check_files(files, one.shares, rank, one.alone, options) for one in passes]
                loaders.extend(TensorLoader(files, restoration, one.wanted, host, options, on_bytes) for one in passes)
                # Record the result: it depends on this host, and a replay of this rank may run on a different host.
                return scope.measured(lambda: checked)

            everyone = scope.all_or_none(prepare)
            runs: list[Callable[[], None]] = []
            for one, loader, *checked in zip(passes, loaders, *everyone, strict=True):
                cached = all(which is not None for which in checked)
                runs.append(partial(loader.run, one.shares, one.alone, cached=cached, same=_same(checked, scope)))
            if len(passes) > 1:
                scope.all_or_none(runs[0])
            if any(loads_early):
                restoration.load_early(scope)
            try:
                scope.all_or_none(runs[-1])
                scope.all_or_none(lambda: builds.append(builds[0]()))
            except CheckpointError as error:
                error.add_note("the state is partly overwritten")
                raise
    finally:
        if host is not None and host is not scope.comm:
            host.close()
    return builds[1]


def _pass(manifest: Manifest, restoration: Restorer, wanted: Wanted, names: Set[str], size: int) -> _Pass:
    """Plan the reads of one pass. `names`: Tensors that any rank needs."""
    shared = [name for name in manifest.tensors if name in names and not name.startswith("@")]
    own = [name for name in wanted.needed if name.startswith("@")]
    ranges = _ranges(restoration, wanted, {*shared, *own})
    return _Pass(wanted, assign(windows_of(manifest, shared), size), windows_of(manifest, [*own, *ranges], ranges))


def _ranges(restoration: Restorer, wanted: Wanted, whole: Set[str]) -> ByteRanges:
    """Return the byte ranges of this rank's shards, except in tensors that are read as a whole."""
    found: dict[str, list[tuple[int, int]]] = {}
    for name, shard in wanted.shards:
        if name not in whole and shard.start < shard.stop:
            item = restoration.entries[name].dtype.itemsize
            found.setdefault(name, []).append((shard.start * item, shard.stop * item))
    return found


def ranks_of_host(comm: Communicator | None) -> Communicator | None:
    """Return a communicator of this host's ranks, which share the bytes that they read; None without a communicator."""
    if comm is None or len(comm.hosts) == 1:
        return comm
    return comm.split(next(i for i, ranks in enumerate(comm.hosts) if comm.rank in ranks))


def _same(found: list[list[list[int]] | None], scope: CollectiveScope) -> bool:
    """Return whether all ranks of this host read the same files."""
    here = next(ranks for ranks in scope.comm.hosts if scope.rank in ranks) if scope.comm is not None else (scope.rank,)
    return bool(found[scope.rank]) and all(found[rank] == found[scope.rank] for rank in here)


def _check_files(
    files: Files, shares: Sequence[Sequence[ReadWindow]], rank: int, own: list[ReadWindow], options: LoadOptions
) -> list[list[int]] | None:
    """Return the identities of the files that ranks share; None if the page cache does not keep file contents.

    Checks that the files to be read by this rank have their full size, and checks their bytes if the options ask for
    it.
    """
    mine = [*shares[rank], *own]
    read = chain(*shares, own) if files.cached else mine
    for index in {window.file for window in read}:
        files.open(index)
    total = sum([window.stop - window.start for window in mine])
    if options.check == "first" or (options.check and total <= _SMALL):
        files.check(mine, hold=total <= _SMALL)
    if not files.cached:
        return None
    indices = sorted({window.file for window in chain(*shares)})
    known = {index: files.identities[index] for index in indices}
    return [[index, *which] for index, which in known.items() if which] if all(known.values()) else []


_STRETCH = 8
"""Number of windows that a rank reads from the disk before other ranks copy them from the page cache: 32 MiB."""


@dataclass(frozen=True)
class LoadOptions:
    """Arguments of `load`."""

    map_location: MapLocation = None
    strict: bool = True
    check: bool | Literal["first"] = True
    progress: Progress | None = None


class TensorLoader:
    """Loads all bytes into their tensors.

    If the host's page cache keeps file contents, each rank reads all bytes that it needs straight into its tensors:
    first its own share from the disk, then the other ranks' shares from the page cache, once those ranks have read
    them. If the page cache does not keep file contents, one rank reads each window and broadcasts it to the other
    ranks. The rank that reads a window from the disk checks it for all ranks that read the same file.

    Args:
        files: The files to read from.
        restoration: Restorer that receives the tensors.
        wanted: The tensors to load.
        host: Communicator of the ranks on this host; None without a communicator.
        options: Options of the load.
        on_bytes: Called with the number of bytes in each loaded window.
    """

    def __init__(
        self,
        files: Files,
        restoration: Restorer,
        wanted: Wanted,
        host: Communicator | None,
        options: LoadOptions,
        on_bytes: Callable[[int], None],
    ) -> None:
        self._files = files
        self._restoration = restoration
        self._host = host
        self._wanted = wanted
        self._on_bytes = on_bytes
        self._check = bool(options.check)
        self._destinations = {
            name: [Destination(restoration.entries[name], wanted.targets.get(name), options.map_location)]
            for name in wanted.needed
        }
        self._shards = [(shard, self._add_shard(name, shard)) for name, shard in wanted.shards]
        self._spare: dict[str, torch.Tensor] = {}
        self._bad: list[Block] = []
        self._failed: list[Exception] = []

    def run(
        self, shares: Sequence[Sequence[ReadWindow]], own: Sequence[ReadWindow], *, cached: bool, same: bool
    ) -> None:
        """Load all tensors. Collective over the host's ranks.

        Args:
            shares: For each rank of the host, the windows to read from the disk.
            own: Windows that only this rank needs.
            cached: Whether the host's page cache keeps file contents; equal on all ranks of the host.
            same: Whether the other ranks of the host read the same files, so that this rank can rely on their checks.

        Raises:
            CorruptError: Data is damaged; the error names all affected tensors.
            OSError: The storage could not be read.
        """
        if self._host is None or self._host.size == 1:
            self._attempt(self._read, shares[0])
        elif cached:
            self._through_memory(self._host, shares, check=self._check and not same)
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
        saved = self._restoration.entries[name].dtype
        local = shard.local
        part = TensorEntry(saved, tuple(local.shape))
        destination = Destination(
            part, local if local.dtype == saved else None, local.device, shard.start * saved.itemsize
        )
        self._destinations.setdefault(name, []).append(destination)
        return destination

    def _attempt(self, step: Callable[..., None], *given: Any) -> None:
        """Run `step`, and store its error until all ranks have finished, because the other ranks wait for this one."""
        if self._failed:
            return
        try:
            step(*given)
        except Exception as error:
            self._failed.append(error)

    # -- reading through the page cache --------------------------------------------------------
    def _through_memory(self, host: Communicator, shares: Sequence[Sequence[ReadWindow]], *, check: bool) -> None:
        """Read all shares. `check`: Whether to check also the other ranks' shares."""
        mine = shares[host.rank]
        for low in range(0, max(map(len, shares)), _STRETCH):
            self._attempt(self._read, mine, low, low + _STRETCH)
            host.barrier()
            for turn in range(1, host.size):
                others = shares[(host.rank + turn) % host.size]
                self._attempt(self._read_into_place, others[low : low + _STRETCH], check)

    def _read(self, windows: Sequence[ReadWindow], low: int = 0, high: int = sys.maxsize) -> None:
        """Read windows from the disk; prefetch the windows that follow."""
        for number in range(low, min(high, len(windows))):
            self._files.prefetch(windows, number)
            self._read_into_place(windows[number : number + 1], self._check)

    def _read_into_place(self, windows: Sequence[ReadWindow], check: bool) -> None:
        for window in windows:
            for block in window.blocks:
                # Headers, and tensors that only other ranks need, have no destination on this rank.
                destinations = self._destinations.get(block.name or "", [])
                if destinations or (block.name is None and check):
                    self._put(block, destinations, check)
            self._on_bytes(window.stop - window.start)

    def _put(self, block: Block, destinations: Sequence[Destination], check: bool) -> None:
        length = block.stop - block.start
        memory = destinations[0].memory(block.offset, length) if len(destinations) == 1 else None
        if not self._files.read(block, memory_of(self._scratch(length)) if memory is None else memory, check=check):
            self._bad.append(block)
        if memory is None:
            for destination in destinations:
                destination.put(block.offset, self._scratch(length))

    # -- reading on one rank, and broadcasting -------------------------------------------------
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
            part = memory[block.start - window.start : block.stop - window.start]
            if not self._files.read(block, part, check=self._check):
                self._bad.append(block)

    def _spread(self, window: ReadWindow, data: torch.Tensor) -> None:
        for block in window.blocks:
            for destination in self._destinations.get(block.name or "", []):
                destination.put(block.offset, data[block.start - window.start : block.stop - window.start])
        self._on_bytes(window.stop - window.start)

    # -- helpers -------------------------------------------------------------------------------
    def _scratch(self, length: int, use: str = "") -> torch.Tensor:
        spare = self._spare.get(use)
        if spare is None or spare.numel() < length:
            spare = self._spare[use] = torch.empty(max(length, BLOCK), dtype=torch.uint8)
        return spare[:length]


def device_for(saved: str, map_location: MapLocation) -> torch.device:
    """Return the device for a tensor that was saved from device `saved`.

    Args:
        saved: A device name such as "cpu" or "cuda:0".
        map_location: As for `torch.load`: a device; a dict from saved devices to new devices (unlisted devices are
            kept); or a function that takes a storage and the saved device, and returns a storage on the new device, or
            None to keep the saved device. Unlike in torch, `map_location=None` means the CPU.

    Example:
        >>> device_for("cuda:0", {"cuda:0": "cpu"})
        device(type='cpu')
    """
    if map_location is None:
        return torch.device("cpu")
    if isinstance(map_location, (str, torch.device)):
        return torch.device(map_location)
    if isinstance(map_location, Mapping):
        return torch.device(map_location.get(saved, saved))
    moved = map_location(torch.UntypedStorage(0), saved)
    if moved is not None and not isinstance(moved, (torch.UntypedStorage, torch.TypedStorage)):
        raise TypeError(f"map_location returned {moved!r:.80}; as for torch.load, it returns a storage, or None")
    return torch.device(saved if moved is None else moved.device)


def check_location(map_location: MapLocation) -> None:
    """Raise TypeError or ValueError unless `map_location` is valid."""
    if isinstance(map_location, Mapping):
        named: list[object] = list(map_location.values())
    elif callable(map_location) or map_location is None:
        named = []
    else:
        named = [map_location]
    for name in named:
        if not isinstance(name, (str, torch.device)):
            raise TypeError(f"map_location is a device, a dict of devices or a function, not {map_location!r:.80}")
        try:
            torch.device(name)
        except RuntimeError as error:
            raise ValueError(f"map_location={map_location!r:.80}: {error}") from error


class Destination:
    """Memory for one tensor's bytes, and the tensor itself once all bytes have arrived.

    Args:
        entry: The tensor's metadata.
        target: Tensor to fill, with the shape and dtype of `entry`, or None.
        map_location: Device of a new tensor if `target` is None.
        start: Offset of the destination's first byte in the saved tensor; `put` ignores bytes outside the destination.
    """

    def __init__(
        self, entry: TensorEntry, target: torch.Tensor | None, map_location: MapLocation, start: int = 0
    ) -> None:
        device = target.device if target is not None else device_for(entry.device, map_location)
        self._target = target
        if target is not None and target.is_contiguous() and not (target.is_conj() or target.is_neg()):
            self._made = target.detach()
        else:
            # Contiguous bytes cannot be copied into a non-contiguous tensor, so collect them in a contiguous tensor
            # first.
            self._made = _blank(entry, device)
        self._flat = as_bytes(self._made)
        self._start = start
        self._memory = memory_of(self._flat) if device.type == "cpu" else None

    def put(self, offset: int, data: torch.Tensor) -> None:
        """Copy uint8 values to the tensor's bytes, starting at byte `offset`."""
        low = max(offset, self._start)
        high = min(offset + data.numel(), self._start + self._flat.numel())
        if low < high:
            self._flat[low - self._start : high - self._start].copy_(data[low - offset : high - offset])

    def memory(self, offset: int, length: int) -> memoryview | None:
        """Return `length` bytes at `offset` as a writable view; None if any are out of range or not in host memory."""
        first = offset - self._start
        inside = 0 <= first <= first + length <= self._flat.numel()
        return self._memory[first : first + length] if inside and self._memory is not None else None

    def tensor(self) -> torch.Tensor:
        """Return the filled tensor."""
        if self._target is None:
            return self._made
        if self._made.data_ptr() != self._target.data_ptr():
            self._target.copy_(self._made)
        return self._target


def _blank(entry: TensorEntry, device: torch.device) -> torch.Tensor:
    # Create a tensor of bytes and view it, because torch warns when it creates a half-precision complex tensor
    # directly.
    return torch.empty(entry.nbytes, dtype=torch.uint8, device=device).view(entry.dtype).view(entry.shape)
