"""Saves on all ranks: ranks compare states, each writes a share, and publishing the manifest commits the save."""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

import torch

from unisono.checkpoint.collective import CollectiveScope, SaveHandle, begin, finish_earlier
from unisono.checkpoint.errors import CheckpointError
from unisono.checkpoint.manifest import (
    BLOCK,
    CHUNK,
    FILE,
    MANIFEST,
    FileEntry,
    FilePiece,
    Manifest,
    TensorEntry,
    blocks,
    digest,
    hasher,
)
from unisono.checkpoint.save_lock import SaveLock
from unisono.checkpoint.storage import Sink, Storage, contents, storage_at
from unisono.checkpoint.tree import (
    DTYPE_NAMES,
    Captured,
    Node,
    as_bytes,
    capture,
    dtype_of,
    leaves,
    memory_of,
    safetensors_form,
)
from unisono.core.tensor_shard import TensorShard
from unisono.core.types import Timeout
from unisono.errors import MismatchError

if TYPE_CHECKING:
    from unisono.communicator import Communicator

__all__ = [
    "SAVE_TOGETHER",
    "ByteShare",
    "Path",
    "Portion",
    "PreparedState",
    "Progress",
    "async_save",
    "check_ranges",
    "commit",
    "prepare",
    "progress_counter",
    "save",
    "shares",
    "start",
    "write",
]

Path = str | os.PathLike[str] | Storage
Progress = Callable[[int, int], None]
"""Called with the number of bytes that this rank has processed, and the total for this rank."""

SAVE_TOGETHER = "If ranks save on a signal, let all stop at the same step with un.stop, and save there"

_log = logging.getLogger("unisono.checkpoint")

_UNSPLIT_BYTES = 4096
"""Tensors of up to this many bytes are written by one rank."""
_ALIGNED = 64


def save(
    path: Path,
    state: Any,
    comm: Communicator | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    timeout: Timeout | None = None,
    progress: Progress | None = None,
) -> None:
    """Save a state. On return, the checkpoint is complete and would survive a power failure.

    Collective: every rank passes the same path and, except for `PerRank` values, the same state. Each rank writes an
    equal share. An earlier checkpoint at the same path is replaced only at the end, and survives a crash before that.

    Args:
        path: A directory to create, on a file system that all ranks share; or a URL that fsspec supports.
        state: Modules, optimizers, schedulers, samplers and anything else with `state_dict` and `load_state_dict`;
            tensors, numbers, strings, bytes; and dicts, lists, tuples and sets of these. Samplers, data loaders, `RNG`,
            `torch.Generator`, `GradientAverager`, codecs and values wrapped in `PerRank` are per rank. Each rank writes
            its own elements of a `TensorShard`.
        comm: The ranks that save together; None for this process alone.
        extra: Plain values to store in the manifest, for readers of the checkpoint.
        timeout: Limit on the wait for the slowest rank in each phase: seconds or a `timedelta`; the communicator's
            timeout if None.
        progress: Called with the number of bytes that this rank has written, and the total for this rank.

    Raises:
        MismatchError: Ranks have different states; the error names tensors and ranks. Nothing was written.
        TypeError: A value in the state cannot be saved (the error names it), or `path` is not a path.
        ValueError: The state is nested too deeply, or contains itself.
        FormatError: Numbers and strings would take too much memory to load; keep long lists as tensors.
        StorageError: The storage is full, read-only, or gone; an earlier checkpoint at the path is kept.
        CheckpointError: Another save to the path is running; the error names its process.
        UnavailableError: `path` is a URL, and fsspec is not installed.

    Cost: each of p ranks writes 1/p of the state. If p > 1, each rank also reads the whole state once to compare it.

    Example:
        >>> import tempfile
        >>> model = torch.nn.Linear(2, 1)
        >>> path = tempfile.mkdtemp() + "/first"
        >>> un.checkpoint.save(path, {"model": model, "step": 7})
        >>> un.checkpoint.load(path, {"model": model, "step": 0})["step"]
        7
    """
    write(path, state, comm, extra=extra, timeout=timeout, progress=progress)


def write(
    path: Path,
    state: Any,
    comm: Communicator | None,
    *,
    extra: Mapping[str, Any] | None,
    timeout: Timeout | None = None,
    progress: Progress | None = None,
    newest: Callable[[], int] = int,
) -> None:
    """Save as `save` does, with a timestamp later than the time (in ns) that `newest` returns on rank 0."""
    storage = storage_at(path)
    finish_earlier(storage.where, comm)
    scope = CollectiveScope(comm, "save", storage.where, timeout)
    make = partial(prepare, state, scope.rank, scope.size, copy=False)
    commit(make, storage, scope, dict(extra or {}), progress, newest)


def async_save(
    path: Path,
    state: Any,
    comm: Communicator | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    timeout: Timeout | None = None,
    progress: Progress | None = None,
) -> SaveHandle:
    """Save as `save` does, but return once this rank's share is copied: training continues during the write.

    Collective: waits until every rank has called `async_save`. Later saves on the same communicator, and the
    communicator's `close`, wait for this save. Only `wait()` on the returned handle confirms that the checkpoint is
    published. A failure is logged, and raised by `wait`, the next save or `close`; if none of these is called, the
    error is printed at exit. Under `launch` and `unisono run`, a save error printed at exit makes the rank fail.

    Args:
        path, state, comm, extra, timeout, progress: As for `save`. `progress` is called from another thread.

    Returns:
        A handle to the save, whose `wait` raises the errors of `save`.

    Cost: blocks the caller while it copies 1/p of the state and, with several ranks, reads the whole state once. The
    copied share of the state stays in memory until it has been written. The first `async_save` on a communicator
    duplicates the communicator.

    Example:
        >>> import tempfile
        >>> weights = torch.zeros(3)
        >>> path = tempfile.mkdtemp()
        >>> saving = un.checkpoint.async_save(path, {"w": weights})
        >>> weights += 1
        >>> saving.wait()
        >>> un.checkpoint.load(path)
        {'w': tensor([0., 0., 0.])}
    """
    return start(path, state, comm, extra=extra, timeout=timeout, progress=progress)


def start(
    path: Path,
    state: Any,
    comm: Communicator | None,
    *,
    extra: Mapping[str, Any] | None,
    timeout: Timeout | None = None,
    progress: Progress | None = None,
    newest: Callable[[], int] = int,
    after: Callable[[], None] | None = None,
) -> SaveHandle:
    """Implement `async_save`. `newest`: As for `write`. `after` is called on every rank after publication."""
    storage = storage_at(path)
    finish_earlier(storage.where, comm)
    rank, size = (comm.rank, comm.size) if comm is not None else (0, 1)
    if comm is not None:
        # Fail immediately if another rank calls a different collective.
        comm.barrier(timeout=timeout)
    # Copy now, but raise an error only in the background, where it is reported to the other ranks.
    copied: Future[PreparedState] = Future()
    try:
        copied.set_result(prepare(state, rank, size, copy=True))
    except Exception as error:
        copied.set_exception(error)

    def work(background_comm: Communicator | None) -> None:
        scope = CollectiveScope(background_comm, "save", storage.where, timeout)
        commit(copied.result, storage, scope, dict(extra or {}), progress, newest)
        if after is not None:
            after()

    return begin(storage.where, comm, work)


def commit(
    make: Callable[[], PreparedState],
    storage: Storage,
    scope: CollectiveScope,
    extra: dict[str, Any],
    progress: Progress | None,
    newest: Callable[[], int],
) -> None:
    """Write and publish a checkpoint, once it is certain that the ranks' states match. Collective.

    An earlier checkpoint remains until the new one is published. `newest` returns a time in ns; the new checkpoint gets
    a later timestamp.
    """
    made: list[PreparedState] = []

    def take() -> tuple[Any, str, str]:
        snapshot = make()
        made.append(snapshot)
        # A single process has nothing to compare.
        found = digest(storage.where.encode() + snapshot.fingerprint()) if scope.size > 1 else ""
        return snapshot.ranges, found, scope.measured(partial(secrets.token_hex, 8))

    ranges, digests, save_ids = zip(*scope.all_or_none(take), strict=True)
    save_id = save_ids[0]
    snapshot = made[0]
    scope.compare(
        digests,
        lambda: {"(the path)": storage.where, **snapshot.describe()},
        "Wrap values that differ on purpose in PerRank(...); un.checkpoint.sync(state, comm) makes the rest equal. "
        f"{SAVE_TOGETHER}. Nothing was written",
    )
    check_ranges(snapshot.shards, ranges, scope.rank)
    lock = SaveLock(storage, save_id)
    parts: list[Any] = []
    try:
        scope.first(partial(_open, storage, lock), stores=True)
        name = f"{save_id}-{scope.rank:05d}.safetensors"
        try:
            parts = scope.all_or_none(lambda: _write(snapshot, storage, name, save_id, progress), stores=True)
        except CheckpointError:
            # Rank 0 may not see this file, if the ranks do not share the storage.
            with suppress(OSError):
                storage.remove(name)
            raise
        scope.first(lambda: _publish(snapshot, parts, storage, save_id, extra, newest, lock), stores=True)
        if scope.rank == 0:
            _remove_files(storage, lock.replaced)
    except BaseException:
        if scope.rank == 0:
            if _is_published(storage, save_id):
                lock.abandon()
            else:
                # Remove the files of all ranks, even of ranks that have died, and even if they are not listed yet.
                _remove_files(storage, {save_id}, [part["file"][0] for part in parts if part["file"]])
        raise
    finally:
        lock.release()


def _open(storage: Storage, lock: SaveLock) -> None:
    # If there is a manifest, the directory is already durable.
    if MANIFEST not in storage.sizes():
        storage.make()
    lock.acquire()


def _write(snapshot: PreparedState, storage: Storage, name: str, save_id: str, progress: Progress | None) -> Any:
    """Write this rank's share, and return its entries for the manifest.

    Raises:
        CheckpointError: A tensor has changed since its digests were computed.
        OSError: The storage failed.
    """
    file: FileEntry | None = None
    pieces: list[tuple[Any, ...]] = []
    if snapshot.portions:
        sink = storage.create(name)
        try:
            file, pieces = _write_file(sink, name, save_id, snapshot.portions, progress)
        except BaseException:
            sink.abandon()
            raise
    own = {name: (DTYPE_NAMES[e.dtype], e.shape, e.device) for name, e in snapshot.own_entries.items()}
    return {"file": file, "pieces": pieces, "trees": snapshot.own_trees, "own": own}


def _write_file(
    sink: Sink, name: str, save_id: str, portions: Sequence[Portion], progress: Progress | None
) -> tuple[FileEntry, list[tuple[Any, ...]]]:
    """Write the portions in order, and finish the file. Digests are computed from the bytes as they are written.

    Returns:
        The file's entry, and for each portion the tensor's name, its first byte in the tensor, its start and stop in
        the file, and the digests of its blocks.
    """
    header = _header(save_id, portions)
    file_hash = hasher()
    file_hash.update(header)
    sink.write(memoryview(header))
    position = len(header)
    on_bytes = progress_counter(progress, sum([len(portion.data) for portion in portions]))
    pieces: list[tuple[Any, ...]] = []
    for portion in portions:
        memory = memory_of(portion.data)
        found = []
        for low in range(0, len(memory), BLOCK):
            block = memory[low : low + BLOCK]
            block_hash = hasher()
            for start in range(0, len(block), CHUNK):
                chunk = block[start : start + CHUNK]
                block_hash.update(chunk)
                file_hash.update(chunk)
            sink.write(block)
            found.append(block_hash.hexdigest())
            on_bytes(len(block))
        if portion.digests is not None and found != portion.digests:
            raise CheckpointError(
                "it was changed while it was being saved; wait for the save, or use async_save, which copies first: "
                f"{portion.name!r}",
                tensors=[portion.name],
            )
        pieces.append((portion.name, portion.start, position, position + len(memory), found))
        position += len(memory)
    sink.finish()
    return FileEntry(name, position, len(header), digest(header), file_hash.hexdigest()), pieces


def progress_counter(progress: Progress | None, total: int) -> Callable[[int], None]:
    """Return a function that adds a number of bytes to those processed, and reports their number to `progress`."""
    done = 0

    def add(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    return add


def _header(save_id: str, portions: Sequence[Portion]) -> bytes:
    """Header of a safetensors file: the length of a JSON object, then the object, padded with spaces.

    A slice of a tensor is stored as a flat tensor, and its name includes its range of elements.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt", "unisono.checkpoint": save_id}}
    offset = 0
    for portion in portions:
        label = portion.name
        shape = portion.entry.shape
        length = len(portion.data)
        if length != portion.entry.nbytes:
            item = portion.entry.dtype.itemsize
            first = portion.start // item
            shape = (length // item,)
            label = f"{label}[{first}:{first + shape[0]}]"
        while label in entries:
            label += "~"
        kind, stored = safetensors_form(portion.entry.dtype, shape)
        entries[label] = {"dtype": kind, "shape": stored, "data_offsets": [offset, offset + length]}
        offset += length
    text = json.dumps(entries, separators=(",", ":")).encode()
    padding = -(8 + len(text)) % _ALIGNED
    return (len(text) + padding).to_bytes(8, "little") + text + b" " * padding


def _publish(
    snapshot: PreparedState,
    parts: list[Any],
    storage: Storage,
    save_id: str,
    extra: dict[str, Any],
    newest: Callable[[], int],
    lock: SaveLock,
) -> None:
    """Assemble the manifest from the entries of all ranks, and publish it."""
    files: list[FileEntry] = []
    tensors = dict(snapshot.entries)
    # The pieces of each tensor, keyed by the offset of their first byte.
    found: dict[str, dict[int, FilePiece]] = {name: {} for name in tensors}
    for part in parts:
        for name, (dtype, shape, device) in part["own"].items():
            tensors[name] = TensorEntry(dtype_of(dtype), tuple(shape), device)
            found[name] = {}
        for name, offset, start, stop, digests in part["pieces"]:
            found[name][offset] = FilePiece(len(files), start, stop, tuple(digests))
        if part["file"]:
            files.append(FileEntry(*part["file"]))
    manifest = Manifest(
        id=save_id,
        ranks=len(parts),
        created_ns=max(time.time_ns(), newest() + 1),
        files=tuple(files),
        tensors={
            n: TensorEntry(e.dtype, e.shape, e.device, tuple(map(found[n].__getitem__, sorted(found[n]))))
            for n, e in tensors.items()
        },
        state=snapshot.tree,
        per_rank=tuple([tuple(part["trees"]) for part in parts]),
        extra={"unisono": _version(), "torch": str(torch.__version__), **extra},
    )
    sizes = storage.sizes()
    absent = [file.name for file in files if sizes.get(file.name) != file.size]
    if absent:
        raise CheckpointError(
            f"rank 0 does not see {absent[0]}, which another rank wrote; save to storage that all ranks share"
        )
    data = manifest.to_bytes()
    lock.check()
    storage.publish(MANIFEST, data)


@cache
def _version() -> str:
    try:
        return version("unisono")
    except PackageNotFoundError:
        return "not installed"


def _is_published(storage: Storage, save_id: str) -> bool:
    """Return whether the published manifest belongs to this save; True if in doubt."""
    try:
        return save_id.encode() in contents(storage, MANIFEST)
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _remove_files(storage: Storage, saves: Set[str], known: Sequence[str] = ()) -> None:
    """Remove the files of some saves: those that the storage lists, and those with known names."""
    try:
        storage.remove(*known)
        storage.remove(*[n for n in storage.sizes() if (found := FILE.fullmatch(n)) and found[1] in saves])
    except OSError as error:
        _log.warning("files of unfinished or replaced saves remain in %s: %s", os.fspath(storage.where), error)


@dataclass(frozen=True)
class Portion:
    """A tensor, or a slice of a tensor, that a rank writes.

    Attributes:
        name: The tensor's name.
        entry: The tensor's dtype and shape.
        start: Offset of the first byte in the tensor.
        data: The bytes, as uint8 values on the CPU.
        digests: Digests of the blocks, if already computed; if the written blocks have other digests, the tensor has
            changed.
    """

    name: str
    entry: TensorEntry
    start: int
    data: torch.Tensor
    digests: list[str] | None = None


class PreparedState:
    """A state prepared for writing on this rank.

    Args:
        captured: The state, split into trees and tensors.

    Attributes:
        tree, entries: The part common to all ranks: its structure, and dtype, shape and device of its tensors.
        own_trees, own_entries: The part that belongs to this rank only.
        shards: Tensors that are `TensorShard`s.
        ranges: For each sharded tensor, start and stop of the elements that this rank saves.
        digests: Digests of each tensor's blocks, slice by slice; empty for a single rank.
        portions: The slices that this rank writes.
    """

    def __init__(self, captured: Captured) -> None:
        self.tree: Node = captured.tree
        self.own_trees: Sequence[Node] = captured.own_trees
        self.shards: dict[str, TensorShard] = captured.shards
        self.entries: dict[str, TensorEntry] = {
            name: TensorEntry(tensor.dtype, tuple(captured.shards.get(name, tensor).shape), str(tensor.device))
            for name, tensor in captured.tensors.items()
        }
        self.own_entries: dict[str, TensorEntry] = {
            name: TensorEntry(tensor.dtype, tuple(tensor.shape), str(tensor.device))
            for name, tensor in captured.own_tensors.items()
        }
        self.ranges: dict[str, tuple[int, int]] = {
            name: (shard.start, shard.stop)
            for name, shard in captured.shards.items()
            if shard.start < shard.stop and shard.replica == 0
        }
        self.digests: dict[str, list[str]] = {}
        self.portions: list[Portion] = []

    def fingerprint(self) -> bytes:
        """Return a fingerprint that is equal on two ranks if their states are equal."""
        tensors = {
            name: (DTYPE_NAMES[entry.dtype], entry.shape, name in self.shards, self.digests.get(name))
            for name, entry in self.entries.items()
        }
        return json.dumps((tensors, self.tree), sort_keys=True).encode()

    def describe(self) -> dict[str, str]:
        """Return a description of each tensor and value, by name; descriptions under the same name are joined."""
        described = {
            name: f"{DTYPE_NAMES[e.dtype]} {list(e.shape)} "
            + ("in shards" if name in self.shards else digest(".".join(self.digests.get(name, ())).encode()))
            for name, e in self.entries.items()
        }
        for name, value in leaves(self.tree).items():
            described[name] = f"{described[name]}, {value}" if name in described else value
        return described


def prepare(state: Any, rank: int, size: int, *, copy: bool) -> PreparedState:
    """Capture a state, compute the digests to compare, and select this rank's share.

    Args:
        state: The state that was passed to `save`.
        rank, size: This rank, and the number of ranks that save.
        copy: Whether to copy the share, so that the state may change before it is written.

    Cost: reads all of the state if there are several ranks; with `copy`, copies 1/size of it.
    """
    captured = capture(state, rank)
    snapshot = PreparedState(captured)
    whole = captured.whole
    slices: dict[str, list[tuple[int, ByteShare]]] = {name: [] for name in whole}
    # Sort by name: ranks may have filled their dicts in different orders.
    plan = shares(sorted([(name, tensor.nbytes, tensor.itemsize) for name, tensor in whole.items()]), size)
    for owner, given in enumerate(plan):
        for part in given:
            slices[part.name].append((owner, part))
    for name, tensor in whole.items():
        flat = as_bytes(tensor.cpu())
        is_view = flat.data_ptr() == tensor.data_ptr()
        for owner, part in slices[name]:
            mine = owner == rank
            data, found = _take(flat[part.start : part.stop], copy and mine and is_view, size > 1)
            snapshot.digests.setdefault(name, []).extend(found)
            if mine:
                known = found if size > 1 else None
                snapshot.portions.append(Portion(name, snapshot.entries[name], part.start, data, known))
    # Add the elements that only this rank has. Rank 0 also writes each sharded tensor that has no elements.
    alone = [(name, snapshot.own_entries[name], tensor, 0) for name, tensor in captured.own_tensors.items()]
    for name, shard in captured.shards.items():
        if name in snapshot.ranges or (rank == 0 and not shard.shape.numel()):
            alone.append((name, snapshot.entries[name], shard.local, shard.start))
    for name, entry, tensor, start in alone:
        flat = as_bytes(tensor.cpu())
        data, _ = _take(flat, copy and flat.data_ptr() == tensor.data_ptr(), False)
        snapshot.portions.append(Portion(name, entry, start * tensor.itemsize, data))
    snapshot.portions.sort(key=attrgetter("entry.dtype.itemsize"), reverse=True)
    return snapshot


def _take(flat: torch.Tensor, copy: bool, hashed: bool) -> tuple[torch.Tensor, list[str]]:
    """Return the bytes (copied if `copy`), and the digests of their blocks (an empty list unless `hashed`)."""
    data = torch.empty_like(flat) if copy else flat
    if not hashed:
        return (data.copy_(flat) if copy else data), []
    memory = memory_of(data)
    digests = []
    for low, high in blocks(0, len(flat)):
        state = hasher()
        for start, stop in blocks(low, high, CHUNK):
            if copy:
                data[start:stop].copy_(flat[start:stop])
            state.update(memory[start:stop])
        digests.append(state.hexdigest())
    return data, digests


@dataclass(frozen=True, slots=True)
class ByteShare:
    """Bytes `start` to `stop` of a tensor."""

    name: str
    start: int
    stop: int


def shares(tensors: Sequence[tuple[str, int, int]], ranks: int) -> list[list[ByteShare]]:
    """Return the slices that each rank writes: disjoint, complete, and equal in size to within 4 KiB.

    The concatenation of all tensors is cut into equal parts, without splitting elements or tensors of up to 4 KiB.
    Tensors with the widest elements come first, so that every slice is aligned in its file.

    Args:
        tensors: Name, size in bytes, and element size of each tensor.
        ranks: Number of shares.

    Example:
        >>> first, second = shares([("a", 8000, 4), ("b", 16, 8)], 2)
        >>> first
        [ByteShare(name='b', start=0, stop=16), ByteShare(name='a', start=0, stop=3992)]
    """
    ordered = sorted(tensors, key=itemgetter(2), reverse=True)
    total = sum([nbytes for _, nbytes, _ in ordered])
    given: list[list[ByteShare]] = [[] for _ in range(ranks)]
    rank = position = 0
    for name, nbytes, item in ordered:
        start = 0
        while rank < ranks - 1 and position + nbytes > (border := (rank + 1) * total // ranks):
            inside = border - position
            cut = inside // item * item if nbytes > _UNSPLIT_BYTES else (nbytes if 2 * inside > nbytes else 0)
            if cut > start:
                given[rank].append(ByteShare(name, start, cut))
                start = cut
            rank += 1
        if start < nbytes or not nbytes:
            given[rank].append(ByteShare(name, start, nbytes))
        position += nbytes
    return given


def check_ranges(shards: Mapping[str, TensorShard], held: Sequence[Mapping[str, tuple[int, int]]], rank: int) -> None:
    """Raise `MismatchError` unless the ranks together have each element of each tensor exactly once.

    Args:
        shards: This rank's shards, by name; the full shapes are the same on all ranks.
        held: For each rank, the start and stop of its elements of each tensor, by tensor name.
        rank: This rank.
    """
    for name, shard in shards.items():
        problem = _problem([(*ranges[name], owner) for owner, ranges in enumerate(held) if name in ranges], shard.shape)
        if problem:
            raise MismatchError(
                f"the shards of {name!r}, of shape {list(shard.shape)}, {problem}. Nothing was written",
                rank=rank,
                size=len(held),
                operation="save",
            )


def _problem(found: list[tuple[int, int, int]], shape: torch.Size) -> str | None:
    """Return the first overlap or gap of ranges, given as start, stop and rank."""
    position = 0
    owner = -1
    for start, stop, other in sorted(found):
        if start < position:
            return f"overlap: elements {start} to {min(position, stop)} are on ranks {owner} and {other}"
        if start > position:
            break
        position = stop
        owner = other
    if position == shape.numel():
        return None
    listed = ", ".join(f"rank {other} has {start} to {stop}" for start, stop, other in sorted(found)[:8])
    return f"lack elements from {position} on: {listed or 'no rank has any'}"
