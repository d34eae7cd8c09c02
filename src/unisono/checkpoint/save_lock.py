"""A lock on a checkpoint's path: one save at a time, across processes and hosts."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from functools import cache
from typing import Any

from unisono.checkpoint.errors import CheckpointError
from unisono.checkpoint.manifest import FILE, MANIFEST
from unisono.checkpoint.storage import Storage, contents
from unisono.host.processes import process_space, started

__all__ = ["SaveLock", "is_locked"]

_NAME = f"{MANIFEST}.lock"
_STALE_S = 3600.0
"""Age in seconds after which the writer of a lock from another host is assumed to be dead."""

_FORM = {"id": str, "pid": int, "started": int, "space": str, "time": float, "replaced": list}

_WAITS = 5
_WAIT_S = 0.05
"""If a lock file is still empty after `_WAITS` such waits, its writer has died."""

_start_of = cache(started)
"""Start time of a process, given its number; asked only for this process. A fork has another number."""

_running: set[str] = set()
"""Identifiers of this process's saves that hold a lock."""


class SaveLock:
    """Lock of a save: a small file in the manifest's directory that names the writing process.

    A lock whose writer ran on this host can be taken over once that process is gone; a lock from another host, once it
    is an hour old. On storage without a `lock` method, two concurrent writers go undetected, but do not remove each
    other's files.

    Args:
        storage: Storage of the checkpoint's path.
        save_id: Identifier of the save; the names of its files begin with it.

    Attributes:
        replaced: Identifiers of the saves whose files are removed once this save is published.
    """

    def __init__(self, storage: Storage, save_id: str) -> None:
        self._storage = storage
        self._id = save_id
        self._entry: dict[str, Any] = {
            "id": save_id,
            "pid": os.getpid(),
            "started": _start_of(os.getpid()),
            "space": process_space().hex(),
            "time": time.time(),
            "replaced": [],
        }
        self.replaced: set[str] = set()
        self._held = False

    def acquire(self) -> None:
        """Acquire the lock, and record which files this save replaces.

        Raises:
            CheckpointError: Another save holds the lock.
        """
        if hasattr(self._storage, "lock"):
            _running.add(self._id)
            try:
                self._take()
            except BaseException:
                _running.discard(self._id)
                raise
            self._held = True
        self._note_published()

    def _take(self) -> None:
        other: dict[str, Any] = {}
        for tries in range(2 * _WAITS):
            self._note_published()
            self._entry["replaced"] = sorted(self.replaced)
            if self._storage.lock(_NAME, json.dumps(self._entry).encode()):
                return
            other = _entry_at(self._storage)
            if _is_alive(other):
                break
            if other:
                # After publication, also remove the dead writer's files, and the files that it was about to remove.
                self.replaced |= {other["id"], *other["replaced"]}
            if other or tries >= _WAITS:
                self._storage.remove(_NAME)
            else:
                # Either the lock has just been released, or another process has created its file and not yet written to
                # it.
                time.sleep(_WAIT_S)
        raise CheckpointError(_held_by(other))

    def _note_published(self) -> None:
        self.replaced.update(FILE.findall(_text_of(self._storage, MANIFEST)))

    def check(self) -> None:
        """Raise `CheckpointError` if another save has taken over this save's lock."""
        if self._held:
            other = _entry_at(self._storage)
            if other != self._entry:
                raise CheckpointError(_held_by(other))

    def abandon(self) -> None:
        """Leave the lock for the next save, because this save may not be durable yet.

        The next save removes the files that this save replaced, once its own manifest is published.
        """
        if self._held:
            self.release()
            with suppress(OSError):
                self._storage.lock(_NAME, json.dumps({**self._entry, "started": 0, "time": 0.0}).encode())

    def release(self) -> None:
        """Remove the lock if it still belongs to this save."""
        if self._held:
            self._held = False
            with suppress(OSError):
                if _entry_at(self._storage) == self._entry:
                    self._storage.remove(_NAME)
            # Discard the ID last: without the ID, another thread of this process that still saw the lock would consider
            # the lock's writer dead.
            _running.discard(self._id)


def is_locked(storage: Storage) -> bool:
    """Return whether a save may be writing to a path."""
    return _is_alive(_entry_at(storage))


def _entry_at(storage: Storage) -> dict[str, Any]:
    """Return the contents of a path's lock; an empty dict if the lock is missing, empty or invalid."""
    try:
        found = json.loads(_text_of(storage, _NAME))
    except ValueError:
        return {}
    if not isinstance(found, dict) or {key: type(found.get(key)) for key in _FORM} != _FORM:
        return {}
    return found if {*map(type, found["replaced"])} <= {str} else {}


def _text_of(storage: Storage, name: str) -> str:
    try:
        return contents(storage, name).decode(errors="replace")
    except FileNotFoundError:
        return ""


def _is_alive(entry: dict[str, Any]) -> bool:
    """Return whether the writer of a lock may still be writing."""
    if not entry:
        return False
    if not entry["started"] or entry["space"] != process_space().hex():
        return bool(time.time() - entry["time"] < _STALE_S)
    return entry["id"] in _running if entry["pid"] == os.getpid() else started(entry["pid"]) == entry["started"]


def _held_by(entry: dict[str, Any]) -> str:
    here = "this host" if entry.get("space") == process_space().hex() else "another host"
    return (
        f"another save to this path is running: of process {entry.get('pid', '?')} on {here}. Ranks that save one "
        f"state together all pass comm, and two jobs need two paths. If there is no such process, delete {_NAME}"
    )
