"""Identity of processes, since process IDs are valid only on one host and reused later; and interpreter options."""

from __future__ import annotations

import hashlib
import subprocess
from functools import cache
from pathlib import Path

__all__ = ["exit_status", "interpreter_flags", "process_space", "process_stat", "started"]


def interpreter_flags() -> list[str]:
    """Return the options that this interpreter was started with, as multiprocessing passes them to its children."""
    # Python has no public name for this.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags


@cache
def process_space() -> bytes:
    """Return an identifier of the scope of process IDs: this host's current boot, and the PID namespace.

    Zeros if unknown.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        space = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return bytes(16)
    return hashlib.blake2b(f"{boot}{space}".encode(), digest_size=16).digest()


def started(pid: int) -> int:
    """Return when a process started, in ticks since boot; 0 if it is gone, or unknown."""
    return int(process_stat(pid)[19])


def exit_status(pid: int) -> int | None:
    """Return a process's exit status, or the negated number of the signal that killed it.

    None while it runs; 0 if unknown, because its parent has collected the status or the platform is not Linux.
    """
    stat = process_stat(pid)
    # An exiting process has a status before it counts as ended.
    code = int(stat[49]) if len(stat) > 49 else 0
    return -(code & 0x7F) or code >> 8 or (0 if stat[0] in "ZX" else None)


def process_stat(pid: int) -> list[str]:
    """Return the fields of Linux's stat file from the state on; if there is no file, as for a process that is gone."""
    try:
        # The name comes first, in parentheses, and may contain any character.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", *["0"] * 19]
