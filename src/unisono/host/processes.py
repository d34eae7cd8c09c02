"""Identity of processes: a number is valid on one host, and used again after a process has ended; options of Python."""

from __future__ import annotations

import hashlib
import subprocess
from functools import cache
from pathlib import Path

__all__ = ["exit_status", "interpreter_flags", "process_space", "process_stat", "started"]


def interpreter_flags() -> list[str]:
    """Return the options that this Python was started with, as multiprocessing passes them on to its children."""
    # There is no public name.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags


@cache
def process_space() -> bytes:
    """Identify where a process number is valid: this boot of this host, and the namespace of process numbers.

    Zeros where that is not known.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        space = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return bytes(16)
    return hashlib.blake2b(f"{boot}{space}".encode(), digest_size=16).digest()


def started(pid: int) -> int:
    """Return when a process started, in ticks since the host did; 0 if it is gone, or not known."""
    return int(process_stat(pid)[19])


def exit_status(pid: int) -> int | None:
    """Return the exit status of a process that has ended, or the negated number of the signal that ended it.

    None while it runs; 0 if nobody knows, because its parent has taken the status, or on other platforms than Linux.
    """
    stat = process_stat(pid)
    # A process that is about to end has its status before it counts as ended.
    code = int(stat[49]) if len(stat) > 49 else 0
    return -(code & 0x7F) or code >> 8 or (0 if stat[0] in "ZX" else None)


def process_stat(pid: int) -> list[str]:
    """Return the fields of Linux's stat file from the state on; as of a process that is gone if there is none."""
    try:
        # The name before them, in parentheses, may hold any character.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", *["0"] * 19]
