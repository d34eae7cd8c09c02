"""Loading together: is it the right model, is it whole, and only then into place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from unisono.checkpoint.digest import BLOCK
from unisono.checkpoint.dtypes import memory_of
from unisono.checkpoint.errors import CheckpointError, CorruptError, StateError
from unisono.checkpoint.manifest import Manifest
from unisono.checkpoint.nodes import taken_over
from unisono.checkpoint.places import Landing, MapLocation
from unisono.checkpoint.reader import Block, Files, Window, deal, read_manifest, windows_of
from unisono.checkpoint.restore import Restoration
from unisono.checkpoint.saving import Progress
from unisono.checkpoint.storage import Storage
from unisono.checkpoint.team import Team

if TYPE_CHECKING:
    from unisono.communicator import Communicator

__all__ = ["Wishes", "load_state"]

_ATTEMPTS = 5
_SMALL = 4 << 20
"""Up to so many bytes a rank, all is checked before anything is changed."""


@dataclass(frozen=True)
class Wishes:
    """How to load: the arguments of `load`."""

    map_location: MapLocation = None
    strict: bool = True
    check: bool | Literal["first"] = True
    progress: Progress | None = None


def load_state(storage: Storage, state: Any, team: Team, wishes: Wishes) -> Any:
    """What `load` does, again if a save over the same name takes the files away meanwhile. Collective."""
    for attempt in range(_ATTEMPTS):
        manifest = _manifest(storage, team)
        try:
            return _load(storage, manifest, state, team, wishes)
        except CorruptError:
            if attempt == _ATTEMPTS - 1 or team.first(lambda: _now(storage)) == manifest.id:
                raise
    raise AssertionError("unreachable")


def _now(storage: Storage) -> str:
    return read_manifest(storage)[0].id


def _manifest(storage: Storage, team: Team) -> Manifest:
    """Read once, by rank 0, for all."""

    def read() -> Any:
        manifest, data = read_manifest(storage)
        manifest.check_sizes(storage.sizes())
        return data, manifest.nbytes

    data, nbytes = team.first(read)
    return Manifest.from_bytes(data, nbytes)


def _load(storage: Storage, manifest: Manifest, state: Any, team: Team, wishes: Wishes) -> Any:
    source = taken_over(manifest.per_rank, team.rank, team.size)
    restoration = Restoration(manifest.tensors, source, strict=wishes.strict)
    builds: list[Callable[[], Any]] = []

    def match() -> list[str]:
        builds.append(restoration.match(state, manifest.state))
        absent = [name for name in restoration.needed if name not in manifest.tensors]
        if absent:
            raise StateError(f"its state refers to {absent[0]!r}, which it does not have")
        return [name for name in restoration.needed if not name.startswith("@")]

    wanted = dict.fromkeys(name for names in team.together(match) for name in names)
    own = [name for name in restoration.needed if name.startswith("@")]
    host = _host(team.comm)
    try:
        rank, size = (host.rank, host.size) if host is not None else (0, 1)
        shares = deal(windows_of(manifest, wanted), size)
        with Files(storage, manifest) as files, torch.no_grad():
            alone = windows_of(manifest, own)
            team.together(lambda: _whole(files, [*shares[rank], *alone], wishes))
            try:
                team.together(lambda: _Filling(files, restoration, host, wishes).run(shares, alone))
            except CheckpointError as error:
                error.message += "; the state is partly overwritten"
                raise
            team.together(lambda: builds.append(builds[0]()))
    finally:
        if host is not None and host is not team.comm:
            host.close()
    return builds[1]


def _host(comm: Communicator | None) -> Communicator | None:
    """The ranks of this host, who share what they read; None if this rank is alone there."""
    if comm is None or comm.size == 1:
        return None
    if len(comm.hosts) == 1:
        return comm
    host = comm.split(next(i for i, ranks in enumerate(comm.hosts) if comm.rank in ranks))
    if host.size == 1:
        host.close()
        return None
    return host


def _whole(files: Files, windows: list[Window], wishes: Wishes) -> None:
    """Whether all files that this rank is to read are there; and all their bytes, if that is to be known first."""
    for index in {window.file for window in windows}:
        files.open(index)
    total = sum(window.stop - window.start for window in windows)
    if wishes.check == "first" or (wishes.check and total <= _SMALL):
        files.check(windows, lambda count: None, hold=total <= _SMALL)


class _Filling:
    """Puts all bytes into their tensors: each window is read by one rank of the host, and broadcast."""

    def __init__(self, files: Files, restoration: Restoration, host: Communicator | None, wishes: Wishes) -> None:
        self._files, self._host, self._wishes, self._restoration = files, host, wishes, restoration
        self._landings = {
            name: Landing(entry, restoration.places.get(name), wishes.map_location)
            for name, entry in restoration.wanted()
        }
        self._spare: dict[str, torch.Tensor] = {}
        self._bad: list[Block] = []
        self._failed: list[OSError] = []
        self._done = self._total = 0

    def run(self, shares: list[list[Window]], own: list[Window]) -> None:
        """Collective over the host's ranks."""
        self._total = sum(window.stop - window.start for windows in (*shares, own) for window in windows)
        if self._host is None:
            for number, window in enumerate(shares[0]):
                self._files.prefetch(shares[0], number)
                self._directly(window)
        else:
            for number in range(max(map(len, shares))):
                self._files.prefetch(shares[self._host.rank], number)
                self._round(self._host, [windows[number] if number < len(windows) else None for windows in shares])
        for window in own:
            self._directly(window)
        self._files.accuse(self._bad)
        if self._failed:
            raise self._failed[0]
        self._restoration.values.update({name: landing.tensor() for name, landing in self._landings.items()})

    def _directly(self, window: Window) -> None:
        for block in window.blocks:
            length = block.stop - block.start
            memory = self._landings[block.name].memory(block.offset, length) if block.name is not None else None
            self._read(block, memory if memory is not None else memory_of(self._scratch(length)))
            if memory is None and block.name is not None:
                self._landings[block.name].put(block.offset, self._scratch(length))
        self._tell(window)

    def _round(self, host: Communicator, coming: list[Window | None]) -> None:
        """All ranks read the next window of theirs, and then give it to the others."""
        mine = coming[host.rank]
        read = self._scratch(mine.stop - mine.start if mine else 0, "read")
        memory = memory_of(read)
        if mine is not None:
            for block in mine.blocks:
                self._read(block, memory[block.start - mine.start : block.stop - mine.start])
        for reader, window in enumerate(coming):
            if window is not None:
                data = read if reader == host.rank else self._scratch(window.stop - window.start)
                self._share(host, reader, window, data.to(host.device))

    def _share(self, host: Communicator, reader: int, window: Window, data: torch.Tensor) -> None:
        host.broadcast(data, reader)
        for block in window.blocks:
            if block.name is not None and block.name in self._landings:
                part = data[block.start - window.start : block.stop - window.start]
                self._landings[block.name].put(block.offset, part)
        self._tell(window)

    def _read(self, block: Block, memory: memoryview) -> None:
        """After an error the other ranks still wait for bytes, so it is kept until all are through."""
        try:
            if not self._files.read(block, memory, check=bool(self._wishes.check)):
                self._bad.append(block)
        except OSError as error:
            self._failed.append(error)

    def _scratch(self, length: int, use: str = "") -> torch.Tensor:
        spare = self._spare.get(use)
        if spare is None or spare.numel() < length:
            spare = self._spare[use] = torch.empty(max(length, BLOCK), dtype=torch.uint8)
        return spare[:length]

    def _tell(self, window: Window) -> None:
        self._done += window.stop - window.start
        if self._wishes.progress is not None:
            self._wishes.progress(self._done, self._total)
