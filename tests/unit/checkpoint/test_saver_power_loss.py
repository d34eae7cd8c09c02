"""Power is lost at any instant of a save, and the disk keeps what it likes: the old checkpoint loads, or the new."""

from __future__ import annotations

import os
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono as un
from unisono.checkpoint import NoCheckpointError
from unisono.testing import run_ranks

Patch = pytest.MonkeyPatch


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory in memory, where there is one: to sync a disk takes a hundred times as long."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        yield Path(name)


def states(number: float) -> dict[str, Any]:
    return {"w": torch.full((3000,), number), "n": number}


class Journal:
    """Notes everything that is done to files below a folder, in order."""

    def __init__(self, patch: Patch, folder: Path) -> None:
        self.folder, self.done = folder, list[tuple[Any, ...]]()
        self._names: dict[int, Path] = {}
        # What one rank has closed, another one may open under the same number before this is noted.
        self._turn = threading.RLock()
        for name in ("open", "write", "fsync", "close", "replace", "unlink", "mkdir"):
            patch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*given: Any, **options: Any) -> Any:
            with self._turn:
                result = real(*given, **options)
                getattr(self, f"_{name}")(result, *given)
            return result

        return wrapped

    def _open(self, fd: int, path: Any, flags: int, *_: Any) -> None:
        self._names[fd] = Path(path).absolute()
        if flags & os.O_CREAT:
            self.done.append(("create", self._names[fd]))

    def _write(self, count: int, fd: int, data: Any) -> None:
        if fd in self._names:
            self.done.append(("write", self._names[fd], bytes(data[:count])))

    def _fsync(self, _: None, fd: int) -> None:
        self.done.append(("sync", self._names[fd]))

    def _close(self, _: None, fd: int) -> None:
        self._names.pop(fd, None)

    def _replace(self, _: None, source: Any, target: Any) -> None:
        self.done.append(("rename", Path(source), Path(target)))

    def _unlink(self, _: None, path: Any, **__: Any) -> None:
        self.done.append(("unlink", Path(path)))

    def _mkdir(self, _: None, path: Any, *__: Any) -> None:
        self.done.append(("mkdir", Path(path)))


class Disk:
    """Content of a disk after a power loss: all synced data, and a random part of the rest.

    Each change of a name, and each byte written, may have got there or not, in any order.
    """

    def __init__(self, luck: Callable[[], bool]) -> None:
        self._luck = luck
        self._names: dict[Path, list[bytes] | None] = {}
        self._durable_names: dict[Path, list[bytes] | None] = {}
        self._pending: list[tuple[Path, list[bytes] | None, bool]] = []
        self._synced: dict[int, int] = {}

    def do(self, what: str, path: Path, more: Any = None) -> None:
        getattr(self, what)(path, more)

    def mkdir(self, path: Path, _: None) -> None:
        self._change(path, None, True)

    def create(self, path: Path, _: None) -> None:
        self._change(path, [], True)

    def write(self, path: Path, data: bytes) -> None:
        content = self._names[path]
        assert content is not None
        content.append(data)

    def rename(self, source: Path, target: Path) -> None:
        content = self._names[source]
        self._change(source, content, False)
        self._change(target, content, True)

    def unlink(self, path: Path, _: None) -> None:
        self._change(path, self._names[path], False)

    def sync(self, path: Path, _: None) -> None:
        content = self._names.get(path)
        if content is not None:
            self._synced[id(content)] = len(content)
        for change in [change for change in self._pending if change[0].parent == path]:
            self._pending.remove(change)
            self._apply(self._durable_names, *change)

    def _change(self, path: Path, content: list[bytes] | None, there: bool) -> None:
        self._apply(self._names, path, content, there)
        self._pending.append((path, content, there))

    @staticmethod
    def _apply(names: dict[Path, Any], path: Path, content: list[bytes] | None, there: bool) -> None:
        if there:
            names[path] = content
        else:
            names.pop(path, None)

    def after_the_crash(self, old: Path, new: Path) -> None:
        """Build it in another folder."""
        names = dict(self._durable_names)
        for change in self._pending:
            if self._luck():
                self._apply(names, *change)
        for path, content in names.items():
            if content is None and (new / path.relative_to(old)).parent.is_dir():
                (new / path.relative_to(old)).mkdir(exist_ok=True)
        for path, content in names.items():
            there = new / path.relative_to(old)
            if content is not None and there.parent.is_dir():
                kept = self._synced.get(id(content), 0)
                rest = [part if self._luck() else bytes(len(part)) for part in content[kept:] if self._luck()]
                there.write_bytes(b"".join([*content[:kept], *rest]))


@pytest.mark.parametrize("ranks", [1, 2])
def test_power_loss_at_any_instant(folder: Path, monkeypatch: Patch, ranks: int) -> None:
    real, chance = folder / "real", random.Random(1)
    real.mkdir()
    with monkeypatch.context() as patch:
        journal = Journal(patch, folder)
        for number in (1.0, 2.0, 3.0):
            run_ranks(lambda comm, n=number: un.checkpoint.save(real / "below" / "name", states(n), comm), ranks)
            journal.done.append(("acknowledged", number))
    lucks = [lambda: True, lambda: False, *[lambda: chance.random() < 0.5] * 3]
    seen = set()
    for instant in range(len(journal.done) + 1):
        least = max([n for what, n, *_ in journal.done[:instant] if what == "acknowledged"], default=0.0)
        for number, luck in enumerate(lucks):
            disk = Disk(luck)
            for change in journal.done[:instant]:
                if change[0] != "acknowledged":
                    disk.do(*change)
            new = folder / f"{instant}-{number}"
            new.mkdir()
            disk.after_the_crash(real, new)
            seen.add(found := number_in(new / "below" / "name"))
            assert least <= found <= least + 1, (
                f"after {instant} of {len(journal.done)}: {journal.done[instant - 1][:2]}"
            )
    assert seen == {0.0, 1.0, 2.0, 3.0}


def number_in(path: Path) -> float:
    """Return the number of the save; 0 if there is none. It must be complete."""
    try:
        state = un.checkpoint.load(path)
    except NoCheckpointError:
        return 0.0
    assert torch.equal(state["w"], states(state["n"])["w"])
    return float(state["n"])
