"""Loading together: is it the right model, is it whole, and only then into place."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from unisono.checkpoint.collective import CollectiveScope
from unisono.checkpoint.errors import CheckpointError, CorruptError, StateError
from unisono.checkpoint.manifest import Manifest
from unisono.checkpoint.map_location import check_location
from unisono.checkpoint.memory_limits import HELD
from unisono.checkpoint.reader import ByteRanges, Files, ReadWindow, assign, read_manifest, windows_of
from unisono.checkpoint.restore import Restorer, Wanted
from unisono.checkpoint.storage import Storage
from unisono.checkpoint.tensor_loader import LoadOptions, TensorLoader
from unisono.checkpoint.tree_utils import remapped_rank

if TYPE_CHECKING:
    from unisono.communicator import Communicator

__all__ = ["load_state"]

_ATTEMPTS = 20
"""Of a load whose files another process replaces meanwhile: a writer may save every millisecond."""
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
    mine: list[Manifest] = []

    def read() -> Any:
        for attempt in range(_ATTEMPTS):
            manifest, data = read_manifest(storage)
            try:
                manifest.check_sizes(storage.sizes())
                break
            except CorruptError:
                if attempt == _ATTEMPTS - 1 or _now(storage) == manifest.id:
                    raise
        mine.append(manifest)
        return data, manifest.nbytes

    data, nbytes = team.first(read)
    return mine[0] if mine else Manifest.from_bytes(data, nbytes)


@dataclass
class _Pass:
    """Tensors that are read together, with the windows to read for all ranks of this host, and for this one alone."""

    wanted: Wanted
    shares: list[list[ReadWindow]]
    alone: list[ReadWindow]
    cached: bool = False
    same: bool = False

    @property
    def nbytes(self) -> int:
        return sum(window.stop - window.start for windows in (*self.shares, self.alone) for window in windows)


def _load(storage: Storage, manifest: Manifest, state: Any, team: CollectiveScope, options: LoadOptions) -> Any:
    source = remapped_rank(manifest.per_rank, team.rank, team.size)
    restoration = Restorer(manifest.tensors, source, strict=options.strict)
    builds: list[Callable[[], Any]] = []

    def match() -> list[list[str]]:
        check_location(options.map_location)
        builds.append(restoration.match(state, manifest.state))
        needed = [list(restoration.early.needed), list(restoration.late.needed)]
        absent = [name for name in chain(*needed) if name not in manifest.tensors]
        if absent:
            raise StateError(f"its state refers to {absent[0]!r}, which it does not have")
        return needed

    found = team.all_or_none(match)
    host = _host(team.comm)
    try:
        rank, size = (host.rank, host.size) if host is not None else (0, 1)
        early, late = (
            _pass(manifest, restoration, wanted, {*chain(*(names[number] for names in found))}, size)
            for number, wanted in enumerate((restoration.early, restoration.late))
        )
        on_bytes = _progress(options, early.nbytes + late.nbytes)
        passes = [early, late] if any(names[0] for names in found) else [late]
        with Files(storage, manifest) as files, torch.no_grad():
            for one in passes:
                checked = team.all_or_none(partial(_check_files, files, one.shares, rank, one.alone, options))
                one.cached = all(which is not None for which in checked)
                one.same = _same(checked, team)
            # Where tensors are created, memory or the device may be missing on one rank.
            loaders: list[TensorLoader] = []

            def create() -> None:
                for one in passes:
                    loader = TensorLoader(
                        files, restoration, one.wanted, host, options, on_bytes, cached=one.cached, same=one.same
                    )
                    loaders.append(loader)

            team.all_or_none(create)
            if len(passes) > 1:
                team.all_or_none(lambda: loaders[0].run(early.shares, early.alone))
            restoration.load_early(team)
            try:
                team.all_or_none(lambda: loaders[-1].run(late.shares, late.alone))
                team.all_or_none(lambda: builds.append(builds[0]()))
            except CheckpointError as error:
                error.message += "; the state is partly overwritten"
                raise
    finally:
        if host is not None and host is not team.comm:
            host.close()
    return builds[1]


def _pass(manifest: Manifest, restoration: Restorer, wanted: Wanted, names: Set[str], size: int) -> _Pass:
    """`names`: those that any rank needs, and this rank's own."""
    shared = [name for name in manifest.tensors if name in names and not name.startswith("@")]
    own = [name for name in wanted.needed if name.startswith("@")]
    ranges = _ranges(restoration, wanted, {*shared, *own})
    return _Pass(wanted, assign(windows_of(manifest, shared), size), windows_of(manifest, [*own, *ranges], ranges))


def _progress(options: LoadOptions, total: int) -> Callable[[int], None]:
    done = 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        if options.progress is not None:
            options.progress(done, total)

    return on_bytes


def _ranges(restoration: Restorer, wanted: Wanted, whole: Set[str]) -> ByteRanges:
    """Bytes to read for shards, of tensors that no rank needs whole."""
    found: dict[str, list[tuple[int, int]]] = {}
    for name, shard in wanted.shards:
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
