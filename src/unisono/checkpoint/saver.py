"""Saving together: compare, write a share each, and let the manifest make it a checkpoint."""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from unisono.checkpoint.collective import CollectiveScope
from unisono.checkpoint.errors import CheckpointError
from unisono.checkpoint.manifest import (
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
from unisono.checkpoint.storage import Storage
from unisono.checkpoint.tree import DTYPE_NAMES, Captured, Node, as_bytes, capture, dtype_of, leaves, memory_of
from unisono.checkpoint.writer import Shard, write_file
from unisono.core.tensor_shard import TensorShard
from unisono.errors import MismatchError

__all__ = [
    "ByteShare",
    "PreparedState",
    "Progress",
    "TensorShard",
    "check_ranges",
    "commit",
    "outline",
    "prepare",
    "shares",
]

Progress = Callable[[int, int], None]
"""Called with the bytes that this rank has processed, and with its total."""

_log = logging.getLogger("unisono.checkpoint")

_UNSPLIT_BYTES = 4096
"""Tensors up to this long are written by one rank."""


def commit(
    make: Callable[[], PreparedState],
    storage: Storage,
    team: CollectiveScope,
    extra: dict[str, Any],
    progress: Progress | None,
    newest: Callable[[], int] = int,
) -> None:
    """Compare, write, and publish. Collective. An earlier checkpoint stays until the new one is published.

    `newest` returns the time of the checkpoint that the new one must be newer than.
    """
    made: list[PreparedState] = []

    def take() -> tuple[Any, str, str]:
        snapshot = make()
        made.append(snapshot)
        # One process has nothing to compare.
        found = digest(storage.where.encode() + snapshot.fingerprint()) if team.size > 1 else ""
        return snapshot.ranges, found, secrets.token_hex(8)

    ranges, digests, save_ids = zip(*team.all_or_none(take), strict=True)
    save_id = save_ids[0]
    snapshot = made[0]
    team.compare(
        digests,
        lambda: {"(the path)": storage.where, **snapshot.describe()},
        "Wrap values that differ on purpose in PerRank(...); un.checkpoint.sync(state, comm) makes the rest equal. "
        "Nothing was written",
    )
    check_ranges(snapshot.shards, ranges, team.rank)
    lock = SaveLock(storage, save_id)
    try:
        team.first(partial(_open, storage, lock))
        name = f"{save_id}-{team.rank:05d}.safetensors"
        try:
            parts = team.all_or_none(lambda: _write(snapshot, storage, name, save_id, progress))
        except CheckpointError:
            with suppress(OSError):
                storage.remove(name)
            raise
        team.first(lambda: _publish(snapshot, parts, storage, save_id, extra, newest, lock))
        if team.rank == 0:
            _remove_files(storage, lock.replaced)
    except BaseException:
        if team.rank == 0:
            if _is_published(storage, save_id):
                lock.abandon()
            else:
                # Those of ranks that have died, too.
                _remove_files(storage, {save_id})
        raise
    finally:
        lock.release()


def _open(storage: Storage, lock: SaveLock) -> None:
    # Where there is a manifest, the directory has been made durable before.
    if MANIFEST not in storage.sizes():
        storage.make()
    lock.acquire()


def _write(snapshot: PreparedState, storage: Storage, name: str, save_id: str, progress: Progress | None) -> Any:
    """Write this rank's share, and return its entries for the manifest."""
    total = sum(len(p.data) for p in snapshot.portions)
    done = 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    file: FileEntry | None = None
    pieces: list[FilePiece] = []
    if snapshot.portions:
        sink = storage.create(name)
        try:
            file, pieces = write_file(sink, name, save_id, snapshot.portions, on_bytes)
        except BaseException:
            sink.abandon()
            raise
    own = {name: [DTYPE_NAMES[e.dtype], list(e.shape), e.device] for name, e in snapshot.own_entries.items()}
    return {
        "file": file and [file.name, file.size, file.header, file.header_digest, file.digest],
        "pieces": [
            (p.name, p.start, q.start, q.stop, list(q.digests)) for p, q in zip(snapshot.portions, pieces, strict=True)
        ],
        "trees": snapshot.own_trees,
        "own": own,
    }


def _publish(
    snapshot: PreparedState,
    parts: list[Any],
    storage: Storage,
    save_id: str,
    extra: dict[str, Any],
    newest: Callable[[], int],
    lock: SaveLock,
) -> None:
    """Put the manifest together from what all ranks have written, and in its place."""
    files: list[FileEntry] = []
    found: dict[str, dict[int, FilePiece]] = {n: {} for part in parts for n in (*snapshot.entries, *part["own"])}
    for part in parts:
        for name, offset, start, stop, digests in part["pieces"]:
            found[name][offset] = FilePiece(len(files), start, stop, tuple(digests))
        if part["file"]:
            files.append(FileEntry(*part["file"]))
    tensors = dict(snapshot.entries)
    for part in parts:
        tensors.update({name: _read_entry(*e) for name, e in part["own"].items()})
    manifest = Manifest(
        id=save_id,
        ranks=len(parts),
        created_ns=max(time.time_ns(), newest() + 1),
        files=tuple(files),
        tensors={
            n: TensorEntry(e.dtype, e.shape, e.device, tuple(piece for _, piece in sorted(found[n].items())))
            for n, e in tensors.items()
        },
        state=snapshot.tree,
        per_rank=tuple(tuple(part["trees"]) for part in parts),
        extra={"unisono": _version(), "torch": str(torch.__version__), **extra},
    )
    names = [file.name for file in files]
    try:
        sizes = storage.sizes()
        absent = [file.name for file in files if sizes.get(file.name) != file.size]
        if absent:
            raise CheckpointError(
                f"rank 0 does not see {absent[0]}, which another rank wrote; save to storage that all ranks share"
            )
        data = manifest.to_bytes()
        lock.check()
        storage.publish(MANIFEST, data)
    except BaseException:
        if not _is_published(storage, save_id):
            with suppress(OSError):
                storage.remove(*names)
        raise


@cache
def _version() -> str:
    try:
        return version("unisono")
    except PackageNotFoundError:
        return "not installed"


def _read_entry(dtype: str, shape: list[int], device: str) -> TensorEntry:
    return TensorEntry(dtype_of(dtype), tuple(shape), device)


def _is_published(storage: Storage, save_id: str) -> bool:
    """Return whether the published manifest is this save's; True if in doubt."""
    try:
        source = storage.open(MANIFEST)
        try:
            data = bytearray(source.size)
            source.read(0, memoryview(data))
            return save_id.encode() in data
        finally:
            source.close()
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _remove_files(storage: Storage, saves: Set[str]) -> None:
    """Remove the files of some saves."""
    try:
        storage.remove(*(n for n in storage.sizes() if (found := FILE.fullmatch(n)) and found[1] in saves))
    except OSError as error:
        _log.warning("files of an earlier save remain in %s: %s", os.fspath(storage.where), error)


@dataclass
class PreparedState:
    """A state as this rank is going to write it.

    Attributes:
        tree, entries: The part common to all ranks: its structure, and dtype, shape and device of its tensors.
        digests: Digests of each tensor's blocks, slice by slice; empty for a single rank.
        own_trees, own_entries: The part that is this rank's.
        shards: Tensors that are `TensorShard`s.
        portions: The slices that this rank writes.
    """

    tree: Node
    entries: dict[str, TensorEntry]
    own_trees: list[Node]
    own_entries: dict[str, TensorEntry]
    shards: Mapping[str, TensorShard] = field(default_factory=dict)
    digests: dict[str, list[str]] = field(default_factory=dict)
    portions: list[Shard] = field(default_factory=list)

    @property
    def ranges(self) -> dict[str, tuple[int, int]]:
        """The elements that this rank saves of each sharded tensor, if any."""
        return {name: (s.start, s.stop) for name, s in self.shards.items() if s.start < s.stop and s.replica == 0}

    def fingerprint(self) -> bytes:
        """Fingerprint that is equal on two ranks if their states are."""
        return json.dumps([self._tensors(), self.tree], sort_keys=True).encode()

    def describe(self) -> dict[str, str]:
        """Text for every tensor and value, by name; values that share a path are listed together under it."""
        described = self._tensors()
        for name, value in leaves(self.tree).items():
            described[name] = f"{described[name]}, {value}" if name in described else value
        return described

    def _tensors(self) -> dict[str, str]:
        return {
            name: f"{DTYPE_NAMES[e.dtype]} {list(e.shape)} "
            + ("in shards" if name in self.shards else digest(".".join(self.digests.get(name, ())).encode()))
            for name, e in self.entries.items()
        }


def outline(captured: Captured) -> PreparedState:
    """Return a snapshot with the structure of a state, without digests of its tensors."""
    return PreparedState(
        captured.tree,
        {name: _entry(tensor, captured.shards.get(name)) for name, tensor in captured.tensors.items()},
        list(captured.own_trees),
        {name: _entry(tensor) for name, tensor in captured.own_tensors.items()},
        captured.shards,
    )


def prepare(state: Any, rank: int, size: int, *, copy: bool) -> PreparedState:
    """Take a state apart, compute the digests to compare, and select this rank's share.

    Args:
        state: As passed to `save`.
        rank, size: This rank, and the number of ranks that save.
        copy: Copy the share, so that the state may change before it is written.

    Cost: reads all of the state if there are several ranks; with `copy`, copies 1/size of it.
    """
    captured = capture(state, rank)
    snapshot = outline(captured)
    slices: dict[str, list[tuple[int, ByteShare]]] = {
        name: [] for name in captured.tensors if name not in captured.shards
    }
    # By name: a dict may have been filled in another order on another rank.
    whole = {name: snapshot.entries[name] for name in slices}
    plan = shares(sorted((name, e.nbytes, e.dtype.itemsize) for name, e in whole.items()), size)
    for owner, given in enumerate(plan):
        for part in given:
            slices[part.name].append((owner, part))
    for name, parts in slices.items():
        flat, mine = _flat(captured.tensors[name])
        for owner, part in parts:
            keep = owner == rank
            data, found = _take(flat[part.start : part.stop], keep and copy and not mine, size > 1)
            snapshot.digests.setdefault(name, []).extend(found)
            if keep:
                snapshot.portions.append(_portion(snapshot.entries, part, data, found if size > 1 else None))
    for name, tensor in captured.own_tensors.items():
        snapshot.portions.append(_unshared(snapshot.own_entries, name, tensor, 0, copy))
    for name, shard in captured.shards.items():
        # A tensor without elements is written by the first rank, like one that is not sharded.
        if name in snapshot.ranges or (rank == 0 and not shard.shape.numel()):
            snapshot.portions.append(_unshared(snapshot.entries, name, shard.local, shard.start, copy))
    snapshot.portions.sort(key=lambda portion: -portion.dtype.itemsize)
    return snapshot


def _entry(tensor: torch.Tensor, shard: TensorShard | None = None) -> TensorEntry:
    return TensorEntry(tensor.dtype, tuple((shard or tensor).shape), str(tensor.device))


def _unshared(entries: Mapping[str, TensorEntry], name: str, tensor: torch.Tensor, start: int, copy: bool) -> Shard:
    """A portion with elements that only this rank has, from element `start` of the tensor on."""
    flat, mine = _flat(tensor)
    data, _ = _take(flat, copy and not mine, False)
    first = start * tensor.itemsize
    return _portion(entries, ByteShare(name, first, first + len(flat)), data, None)


def _portion(entries: Mapping[str, TensorEntry], part: ByteShare, data: torch.Tensor, found: list[str] | None) -> Shard:
    entry = entries[part.name]
    known = None if found is None else tuple(found)
    return Shard(part.name, entry.dtype, entry.shape, part.start, part.stop, data, known)


def _flat(tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """A tensor's bytes on the CPU, and whether they are a copy already."""
    flat = as_bytes(tensor.cpu())
    return flat, flat.data_ptr() != tensor.data_ptr()


def _take(flat: torch.Tensor, copy: bool, hashed: bool) -> tuple[torch.Tensor, list[str]]:
    """Return the bytes or a copy of them, and the digests of their blocks if `hashed`."""
    data = torch.empty_like(flat) if copy else flat
    if not hashed:
        return (data.copy_(flat) if copy else data), []
    memory = memory_of(data)
    digests = []
    for low, high in blocks(0, len(flat)):
        state = hasher()
        for start in range(low, high, CHUNK):
            stop = min(start + CHUNK, high)
            if copy:
                data[start:stop].copy_(flat[start:stop])
            state.update(memory[start:stop])
        digests.append(str(state.hexdigest()))
    return data, digests


@dataclass(frozen=True, slots=True)
class ByteShare:
    """Bytes `start` to `stop` of a tensor."""

    name: str
    start: int
    stop: int


def shares(tensors: Sequence[tuple[str, int, int]], ranks: int) -> list[list[ByteShare]]:
    """For each rank, the slices that it writes: disjoint, covering, and equal in bytes up to 4 KiB.

    Tensors are concatenated, and the sequence is cut into equal parts. Tensors of up to 4 KiB are not split, nor are
    elements. Wide elements come first, so that each slice is aligned in an aligned file.

    Args:
        tensors: Name, bytes, and bytes of one element, of each.
        ranks: Number of shares.

    Example:
        >>> first, second = shares([("a", 8000, 4), ("b", 16, 8)], 2)
        >>> first
        [ByteShare(name='b', start=0, stop=16), ByteShare(name='a', start=0, stop=3992)]
    """
    ordered = sorted(tensors, key=lambda tensor: -tensor[2])
    total = sum(nbytes for _, nbytes, _ in ordered)
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
    """Raise `MismatchError` unless the ranks together have each element of each tensor once.

    Args:
        shards: The shards of this rank, by name; on all ranks of the same shapes.
        held: For each rank the elements that it has of a tensor, if any, as start and stop.
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
    """Return the first overlap or gap of ranges, which are start, stop and rank."""
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
