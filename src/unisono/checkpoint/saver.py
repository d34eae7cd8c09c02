"""Saving together: compare, write a share each, and let the manifest make it a checkpoint."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Set
from contextlib import suppress
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from unisono.checkpoint.collective import CollectiveScope
from unisono.checkpoint.dtypes import dtype_of, name_of
from unisono.checkpoint.errors import CheckpointError
from unisono.checkpoint.manifest import FILE, MANIFEST, FileEntry, Manifest, Piece, TensorEntry
from unisono.checkpoint.save_lock import SaveLock
from unisono.checkpoint.snapshot import Snapshot
from unisono.checkpoint.storage import Storage
from unisono.checkpoint.tensor_shard import check_ranges
from unisono.checkpoint.writer import write_file

__all__ = ["Progress", "commit"]

Progress = Callable[[int, int], None]
"""Called with the bytes that this rank has processed, and with its total."""

_log = logging.getLogger("unisono.checkpoint")


def commit(
    make: Callable[[], Snapshot],
    storage: Storage,
    team: CollectiveScope,
    extra: dict[str, Any],
    progress: Progress | None,
    newest: Callable[[], int] = int,
) -> None:
    """Compare, write, and publish. Collective. An earlier checkpoint stays until the new one is published.

    `newest` returns the time of the checkpoint that the new one must be newer than.
    """
    made: list[Snapshot] = []

    def ranges() -> Any:
        made.append(make())
        return made[0].ranges

    held, save_id = team.all_or_none(ranges), team.first(lambda: secrets.token_hex(8))
    snapshot = made[0]
    team.compare(
        lambda: storage.where.encode() + snapshot.fingerprint(),
        lambda: {"(the path)": storage.where, **snapshot.describe()},
        "Wrap values that differ on purpose in PerRank(...); un.checkpoint.sync(state, comm) makes the rest equal. "
        "Nothing was written",
    )
    check_ranges(snapshot.shards, held, team.rank)
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


def _write(snapshot: Snapshot, storage: Storage, name: str, save_id: str, progress: Progress | None) -> Any:
    """Write this rank's share, and return its entries for the manifest."""
    total, done = sum(len(p.data) for p in snapshot.portions), 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    file: FileEntry | None = None
    pieces: list[Piece] = []
    if snapshot.portions:
        sink = storage.create(name)
        try:
            file, pieces = write_file(sink, name, save_id, snapshot.portions, on_bytes)
        except BaseException:
            sink.abandon()
            raise
    own = {name: [name_of(e.dtype), list(e.shape), e.device] for name, e in snapshot.own_entries.items()}
    return {
        "file": file and [file.name, file.size, file.header, file.header_digest, file.digest],
        "pieces": [
            (p.name, p.start, q.start, q.stop, list(q.digests)) for p, q in zip(snapshot.portions, pieces, strict=True)
        ],
        "trees": snapshot.own_trees,
        "own": own,
    }


def _publish(
    snapshot: Snapshot,
    parts: list[Any],
    storage: Storage,
    save_id: str,
    extra: dict[str, Any],
    newest: Callable[[], int],
    lock: SaveLock,
) -> None:
    """Put the manifest together from what all ranks have written, and in its place."""
    files: list[FileEntry] = []
    found: dict[str, dict[int, Piece]] = {n: {} for part in parts for n in (*snapshot.entries, *part["own"])}
    for part in parts:
        for name, offset, start, stop, digests in part["pieces"]:
            found[name][offset] = Piece(len(files), start, stop, tuple(digests))
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
