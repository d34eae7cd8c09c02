"""Identifies processes, whose IDs are valid only on one host and are reused; also returns interpreter options."""

from __future__ import annotations

import hashlib
import subprocess
from functools import cache
from pathlib import Path

__all__ = ["exit_status", "interpreter_flags", "process_space", "process_stat", "started"]


def interpreter_flags() -> list[str]:
    """Return the command-line options of this interpreter, as multiprocessing passes them to child processes."""
    # `_args_from_interpreter_flags` is private, but Python has no public equivalent.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags


@cache
def process_space() -> bytes:
    """Return an identifier of the scope in which process IDs are unique: this host's current boot and PID namespace.

    The identifier is all zeros if the boot or the PID namespace is unknown.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        space = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return bytes(16)
    return hashlib.blake2b(f"{boot}{space}".encode(), digest_size=16).digest()


def started(pid: int) -> int:
    """Return when a process started, in ticks since boot; 0 if the process is gone or the time is unknown."""
    return int(process_stat(pid)[19])


def exit_status(pid: int) -> int | None:
    """Return a process's exit status, or the negated number of the signal that killed it.

    Returns None while the process runs, and 0 if the exit status is unknown, because the parent has collected it or the
    platform is not Linux.
    """
    stat = process_stat(pid)
    # Check the exit status before the state: an exiting process has one even before its state shows that it is exiting.
    code = int(stat[49]) if len(stat) > 49 else 0
    return -(code & 0x7F) or code >> 8 or (0 if stat[0] in "ZX" else None)


def process_stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat, beginning with the process's state.

    If /proc/<pid>/stat cannot be read, the fields are those of a process that has ended.
    """
    try:
        # Split after the last parenthesis: the process name is in parentheses and may contain any character.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", *["0"] * 19]
