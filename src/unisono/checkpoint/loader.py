"""Loading together: is it the right model, is it whole, and only then into place."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from unisono.checkpoint.collective import CollectiveScope
from unisono.checkpoint.errors import CheckpointError, CorruptError, StateError
from unisono.checkpoint.manifest import Manifest
from unisono.checkpoint.map_location import check_location
from unisono.checkpoint.memory_limits import HELD
from unisono.checkpoint.reader import ByteRanges, Files, ReadWindow, assign, read_manifest, windows_of
from unisono.checkpoint.restore import Restorer
from unisono.checkpoint.storage import Storage
from unisono.checkpoint.tensor_loader import LoadOptions, TensorLoader
from unisono.checkpoint.tree_utils import remapped_rank

if TYPE_CHECKING:
    from unisono.communicator import Communicator

__all__ = ["load_state"]

_ATTEMPTS = 5
_SMALL = HELD
"""Bytes a rank up to which everything is checked before anything is changed."""


def load_state(storage: Storage, state: Any, team: CollectiveScope, options: LoadOptions) -> Any:
    """Implement `load`; retry if a concurrent save over the same name removes the files. Collective."""
    for attempt in range(_ATTEMPTS):
        manifest = _manifest(storage, team)
        try:
            return _load(storage, manifest, state, team, options)
        except CorruptError:
            if attempt == _ATTEMPTS - 1 or team.first(lambda: _now(storage)) == manifest.id:
                raise
    raise AssertionError("unreachable")


def _now(storage: Storage) -> str:
    return read_manifest(storage)[0].id


def _manifest(storage: Storage, team: CollectiveScope) -> Manifest:
    """Read the manifest on rank 0, for all ranks."""

    def read() -> Any:
        manifest, data = read_manifest(storage)
        manifest.check_sizes(storage.sizes())
        return data, manifest.nbytes

    data, nbytes = team.first(read)
    return Manifest.from_bytes(data, nbytes)


def _load(storage: Storage, manifest: Manifest, state: Any, team: CollectiveScope, options: LoadOptions) -> Any:
    source = remapped_rank(manifest.per_rank, team.rank, team.size)
    restoration = Restorer(manifest.tensors, source, strict=options.strict)
    builds: list[Callable[[], Any]] = []

    def match() -> list[str]:
        check_location(options.map_location)
        builds.append(restoration.match(state, manifest.state))
        absent = [name for name in restoration.needed if name not in manifest.tensors]
        if absent:
            raise StateError(f"its state refers to {absent[0]!r}, which it does not have")
        return [name for name in restoration.needed if not name.startswith("@")]

    shared = dict.fromkeys(name for names in team.all_or_none(match) for name in names)
    own = [name for name in restoration.needed if name.startswith("@")]
    ranges = _ranges(restoration, {*shared, *own})
    host = _host(team.comm)
    try:
        rank, size = (host.rank, host.size) if host is not None else (0, 1)
        shares = assign(windows_of(manifest, shared), size)
        with Files(storage, manifest) as files, torch.no_grad():
            alone = windows_of(manifest, [*own, *ranges], ranges)
            found = team.all_or_none(lambda: _check_files(files, shares, rank, alone, options))
            cached, same = all(which is not None for which in found), _same(found, team)
            ready: list[TensorLoader] = []
            # Where tensors are created, memory or the device may be missing on one rank.
            team.all_or_none(
                lambda: ready.append(TensorLoader(files, restoration, host, options, cached=cached, same=same))
            )
            try:
                team.all_or_none(lambda: ready[0].run(shares, alone))
            except CheckpointError as error:
                error.message += "; the state is partly overwritten"
                raise
            team.all_or_none(lambda: builds.append(builds[0]()))
    finally:
        if host is not None and host is not team.comm:
            host.close()
    return builds[1]


def _ranges(restoration: Restorer, whole: Set[str]) -> ByteRanges:
    """Bytes to read for shards, of tensors that no rank needs whole."""
    found: dict[str, list[tuple[int, int]]] = {}
    for name, shard in restoration.shards:
        if name not in whole and shard.start < shard.stop:
            item = restoration.entries[name].dtype.itemsize
            found.setdefault(name, []).append((shard.start * item, shard.stop * item))
    return found


def _host(comm: Communicator | None) -> Communicator | None:
    """The ranks of this host, which share what they read; None if this rank is alone there."""
    if comm is None or comm.size == 1:
        return None
    if len(comm.hosts) == 1:
        return comm
    host = comm.split(next(i for i, ranks in enumerate(comm.hosts) if comm.rank in ranks))
    if host.size == 1:
        host.close()
        return None
    return host


def _same(found: list[list[list[int]] | None], team: CollectiveScope) -> bool:
    """Return whether all ranks of this host read the same files."""
    here = next(ranks for ranks in team.comm.hosts if team.rank in ranks) if team.comm is not None else (team.rank,)
    return bool(found[team.rank]) and all(found[rank] == found[team.rank] for rank in here)


def _check_files(
    files: Files, shares: Sequence[Sequence[ReadWindow]], rank: int, own: list[ReadWindow], options: LoadOptions
) -> list[list[int]] | None:
    """Identities of the files that are read for all ranks, if the page cache keeps their bytes; None if not.

    Checks that all files that this rank will read exist in full, and also their bytes if these are to be checked first.
    """
    mine = [*shares[rank], *own]
    read = chain(*shares, own) if files.cached else mine
    for index in {window.file for window in read}:
        files.open(index)
    total = sum(window.stop - window.start for window in mine)
    if options.check == "first" or (options.check and total <= _SMALL):
        files.check(mine, lambda count: None, hold=total <= _SMALL)
    if not files.cached:
        return None
    indices = sorted({window.file for window in chain(*shares)})
    known = {index: files.identities[index] for index in indices}
    return [[index, *which] for index, which in known.items() if which] if all(known.values()) else []
