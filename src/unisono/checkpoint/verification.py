"""Verification of a checkpoint, and search for the newest or the last good one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from unisono.checkpoint.collective import CollectiveScope
from unisono.checkpoint.errors import CheckpointError, CorruptError
from unisono.checkpoint.loader import Destination
from unisono.checkpoint.manifest import BLOCK, CHUNK, Manifest, TensorEntry, blocks, hasher
from unisono.checkpoint.reader import Files, read_manifest, windows_of
from unisono.checkpoint.restore import Restorer, Wanted
from unisono.checkpoint.saver import Progress
from unisono.checkpoint.storage import Storage, storage_at
from unisono.checkpoint.tree import DTYPE_NAMES, as_bytes, capture, dtype_of, names_in, tagged

if TYPE_CHECKING:
    from unisono.communicator import Communicator

__all__ = ["complete", "last_good", "latest", "sync", "verify"]

_OFFERED = 3
_AHEAD = 64 << 20
_QUICKLY = 8 << 30


def verify(path: str | os.PathLike[str] | Storage, *, progress: Progress | None = None) -> Manifest:
    """Read every byte of a checkpoint, and compare it with what was saved.

    Args:
        path: A directory, a URL that fsspec supports, or a storage.
        progress: Called with the bytes that are done, and with the total.

    Returns:
        The manifest: `tensors`, `files`, `ranks`, `nbytes`.

    Raises:
        CorruptError: It is damaged; all tensors concerned are in `tensors`, the first ones in the message.
        NoCheckpointError, FormatError, StorageError: As `load`.

    Cost: one pass over the files, at the speed of the disk.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp()
        >>> un.checkpoint.save(path, {"w": torch.zeros(3)})
        >>> un.checkpoint.verify(path).nbytes > 12
        True
    """
    storage = storage_at(path)
    found: list[Manifest] = []
    CollectiveScope(None, "verify", storage.where).all_or_none(lambda: found.append(_verify(storage, progress)))
    return found[0]


def _verify(storage: Storage, progress: Progress | None) -> Manifest:
    manifest, _ = read_manifest(storage)
    manifest.check_sizes(storage.sizes())
    done = 0
    suspects = []
    spare = memoryview(bytearray(min(CHUNK, max((file.size for file in manifest.files), default=0))))
    with Files(storage, manifest) as files:
        for index, file in enumerate(manifest.files):
            source = files.open(index)
            file_hash = hasher()
            for start, stop in blocks(0, file.size, CHUNK):
                if start % (_AHEAD // 2) == 0:
                    source.prefetch(start, min(start + _AHEAD, file.size))
                chunk = spare[: stop - start]
                source.read(start, chunk)
                file_hash.update(chunk)
                done += stop - start
                if progress is not None:
                    progress(done, manifest.nbytes)
            if file_hash.hexdigest() != file.digest:
                suspects.append(index)
        if suspects:
            names = [name for index in suspects for name in manifest.names_in_file(index)]
            files.check([w for w in windows_of(manifest, names) if w.file in suspects], lambda count: None)
            file = manifest.files[suspects[0]]
            raise CorruptError(f"damaged: the digest of {file.name} does not match", tensors=names)
    return manifest


def complete(directory: Storage) -> list[tuple[Storage, Manifest]]:
    """The checkpoints in a directory with an intact manifest and files of the recorded sizes; newest first."""
    found = list[tuple[Storage, Manifest]]()
    before = set[str]()
    names = set(directory.children())
    while names and not found:
        for name in names:
            with suppress(CheckpointError, OSError):
                manifest, _ = read_manifest(directory.child(name))
                manifest.check_sizes(directory.child(name).sizes())
                found.append((directory.child(name), manifest))
        if names == before:
            break
        if not found:
            # Meanwhile another process may have completed one, and removed all others.
            before = names
            names = set(directory.children())
    return sorted(found, key=lambda pair: (-pair[1].created_ns, pair[0].name))


def latest(directory: str | os.PathLike[str] | Storage) -> str | None:
    """Return the path of the newest complete checkpoint in a directory; None if there is none.

    Checkpoints that a crash left unfinished do not count, nor do those with missing or truncated files. Bytes are not
    compared: `load` and `verify` do that. The newest is the last one saved, by the clock of rank 0's host; checkpoints
    of one `Checkpointer` stay in order even if that clock was set back.

    Args:
        directory: The parent of the checkpoints: a directory, a URL that fsspec supports, or a storage.

    Raises:
        OSError: The directory cannot be read; a missing one is empty.

    Cost: reads the manifest of every checkpoint in the directory.

    Example:
        >>> import pathlib, tempfile
        >>> runs = pathlib.Path(tempfile.mkdtemp())
        >>> un.checkpoint.latest(runs)
        >>> for epoch in range(3):
        ...     un.checkpoint.save(runs / f"epoch-{epoch}", {"epoch": epoch})
        >>> pathlib.Path(un.checkpoint.latest(runs)).name
        'epoch-2'
    """
    found = complete(storage_at(directory))
    return found[0][0].where if found else None


def last_good(storage: Storage) -> str | None:
    """The newest checkpoint beside this one that can be loaded instead, for messages."""
    try:
        beside = [pair for pair in complete(storage.parent()) if pair[0].name != storage.name]
    except OSError:
        return None
    for other, manifest in beside[:_OFFERED]:
        if manifest.nbytes > _QUICKLY:
            return f"{other.where} (not verified)"
        with suppress(CheckpointError, OSError):
            _verify(other, None)
            return other.where
    return None


def sync(state: Any, comm: Communicator, src: int = 0) -> Any:
    """Make every rank's state that of rank `src`, in place, and return it. Collective.

    Intended for ranks that have joined later, or have diverged. Samplers take over `src`'s state; random
    generators and `PerRank` values stay unchanged on each rank.

    Args:
        state: As for `save`, of the same shape on every rank; an optimizer may not have stepped yet.
        comm: The ranks to make equal.
        src: The rank to copy from.

    Returns:
        `state` itself if it is a dict, list, tensor or object; else, on the other ranks, a new value.

    Raises:
        StateError: On every rank, if some rank's state is of another model, or an object refuses it; as `load`.
        TypeError: As `save`; or the state has a `TensorShard`.
        ValueError: `src` is no rank of `comm`.

    Cost: one broadcast of the state's bytes in messages of up to 4 MiB.

    Example:
        >>> def program(comm):
        ...     state = {"w": torch.full((2,), float(comm.rank)), "step": comm.rank}
        ...     return un.checkpoint.sync(state, comm, src=1)
        >>> un.launch(program, 2, "thread")[0]
        {'w': tensor([1., 1.]), 'step': 1}
    """
    team = CollectiveScope(comm, "sync")
    source = comm.rank == src
    made: list[Any] = []
    team.all_or_none(lambda: made.append(_described(state, src) if source else None))
    if not source:
        made[0] = None, ""
    tensors, text = made[0]
    tree, trees, listed = json.loads(comm.broadcast_object(text if source else None, src))
    entries = {name: TensorEntry(dtype_of(dtype), tuple(shape)) for name, dtype, shape in listed}
    restoration = Restorer(entries, lambda index, policy: trees[index])
    builds: list[Any] = []

    def match() -> list[list[str]]:
        builds.append(restoration.match(state, tree))
        _refuse_shards(name for name, _ in restoration.late.shards)
        return [list(restoration.early.needed), list(restoration.late.needed)]

    found = team.all_or_none(lambda: match() if not source else [[], []])

    def receive(wanted: Wanted, number: int) -> None:
        names = {name for needed in found for name in needed[number]}
        destinations = {name: Destination(entries[name], wanted.targets.get(name), None) for name in wanted.needed}
        for run in _runs({name: entry for name, entry in entries.items() if name in names}):
            _send(comm, src, run, tensors, destinations)
        restoration.values.update({name: destination.tensor() for name, destination in destinations.items()})

    with torch.no_grad():
        receive(restoration.early, 0)
        restoration.load_early(team)
        receive(restoration.late, 1)
        team.all_or_none(lambda: builds.append(builds[0]()) if not source else None)
    return state if source else builds[1]


def _described(state: Any, rank: int) -> tuple[dict[str, torch.Tensor], str]:
    """The tensors to send, and the rest of the state as text."""
    captured = capture(state, rank)
    _refuse_shards(captured.shards)
    policies = dict(body for tag, body in tagged(captured.tree) if tag == "$rank")
    trees = [
        tree if policies.get(index) in ("shared", "all") else None for index, tree in enumerate(captured.own_trees)
    ]
    tensors = dict(captured.tensors)
    tensors.update({name: captured.own_tensors[name] for tree in trees for name in names_in(tree)})
    listed = [(name, DTYPE_NAMES[t.dtype], list(t.shape)) for name, t in tensors.items()]
    return tensors, json.dumps([captured.tree, trees, listed])


def _refuse_shards(names: Iterable[str]) -> None:
    for name in names:
        raise TypeError(f"{name!r} is a TensorShard, of which no rank has all elements; save the state and load it")


_Run = list[tuple[str, int, int]]


def _runs(entries: dict[str, TensorEntry]) -> Iterator[_Run]:
    """Bytes of tensors that travel in one message: small ones together, large ones in parts."""
    run: _Run = []
    filled = 0
    for name, entry in entries.items():
        start = 0
        while start < entry.nbytes:
            stop = min(entry.nbytes, start + BLOCK - filled)
            run.append((name, start, stop))
            filled += stop - start
            start = stop
            if filled == BLOCK:
                yield run
                run = []
                filled = 0
    if run:
        yield run


def _send(
    comm: Communicator,
    src: int,
    run: _Run,
    tensors: dict[str, torch.Tensor] | None,
    destinations: dict[str, Destination],
) -> None:
    if tensors is not None:
        parts = [as_bytes(tensors[name])[start:stop].to(comm.device) for name, start, stop in run]
        data = parts[0] if len(parts) == 1 else torch.cat(parts)
    else:
        length = sum(stop - start for _, start, stop in run)
        data = torch.empty(length, dtype=torch.uint8, device=comm.device)
    comm.broadcast(data, src)
    position = 0
    for name, start, stop in run:
        if name in destinations:
            destinations[name].put(start, data[position : position + stop - start])
        position += stop - start
