"""Resources of this process and its children, to be equal before and after."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

__all__ = ["held", "wait_until_as"]

Held = dict[str, list[str]]


def held() -> Held:
    """Threads, descriptors, child processes, and files where temporary ones and segments are."""
    return {
        "threads": sorted(_threads()),
        "descriptors": sorted(kind for path in Path("/proc/self/fd").iterdir() if (kind := _kind(path))),
        "processes": sorted(_descendants(os.getpid())),
        "files": sorted(path.name for path in (Path(tempfile.gettempdir()), Path("/dev/shm")) for path in _ours(path)),
    }


def _threads() -> list[str]:
    """All of them, also those that Python does not know, but not those that torch keeps for backward passes."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            found.append((task / "comm").read_text().strip())
        except OSError:
            continue
    return [name for name in found if not name.startswith("pt_autograd_")]


def _ours(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if "unisono" in path.name] if folder.is_dir() else []


def _kind(path: Path) -> str:
    try:
        return str(path.readlink()).partition(":")[0]
    except OSError:
        return ""


def _descendants(parent: int) -> list[str]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        name, after = text[text.index("(") : text.rindex(")") + 1], text[text.rindex(")") + 2 :].split()
        if int(after[1]) == parent and after[0] != "Z":
            child = int(stat.parent.name)
            found += [name, *_descendants(child)]
    return found


def wait_until_as(before: Held, *kinds: str, within_s: float = 10.0) -> str:
    """Return the new resources (of these kinds, or all) that remain after some time; empty if none do."""
    deadline = time.monotonic() + within_s
    while True:
        now = held()
        more = {what: _more(now[what], before[what]) for what in kinds or now if _more(now[what], before[what])}
        if not more or time.monotonic() > deadline:
            return "; ".join(f"{what}: {names}" for what, names in more.items())
        time.sleep(0.05)


def _more(now: list[str], before: list[str]) -> list[str]:
    left = list(before)
    # None is what is wanted of it.
    return [name for name in now if name not in left or left.remove(name)]  # type: ignore[func-returns-value]
