"""The secret that all ranks of a job share: given, in the environment, or in a file of this user."""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from pathlib import Path

from unisono.errors import CommError

__all__ = ["find_secret", "refuse_if_shared", "secret_bytes"]

_VARIABLE = "UNISONO_SECRET"


def find_secret(given: str | bytes | None = None) -> bytes:
    """Return the given secret, else that of $UNISONO_SECRET, else that of this user on this host.

    The last is random, created at the first call, and kept in a file that only this user can read:
    `~/.config/unisono/secret` (or under $XDG_CONFIG_HOME), or under the directory for temporary
    files where there is no home to write to.

    Raises:
        ValueError, TypeError: The secret that was given is empty, or neither text nor bytes.
        CommError: The file could be read by others, or belongs to another user.

    Example:
        >>> find_secret("open sesame")
        b'open sesame'
    """
    chosen = os.environ.get(_VARIABLE) if given is None else given
    return _of_this_user() if chosen is None else secret_bytes(chosen)


def secret_bytes(given: str | bytes) -> bytes:
    """Return a secret chosen by the caller or the environment, as bytes. Raises as `find_secret` does."""
    # Made of a number, bytes would be that many zeros.
    if not isinstance(given, str | bytes | bytearray | memoryview):
        raise TypeError(f"the secret must be text or bytes, not {type(given).__name__}")
    # An environment may hold any bytes.
    secret = given.encode(errors="surrogateescape") if isinstance(given, str) else bytes(given)
    if not secret:
        raise ValueError(f"the secret is empty; pass some random text (or leave {_VARIABLE} unset on a single host)")
    return secret


def _of_this_user() -> bytes:
    last: OSError | RuntimeError | None = None
    for directory in (_config_directory, _temporary_directory):
        try:
            return _read_or_create(directory())
        except CommError:
            raise
        # No home, no right to write there, or a file system that is full, read-only or without hard links.
        except (OSError, RuntimeError) as error:
            last = error
    raise CommError(
        f"no folder can hold the secret ({last}); set {_VARIABLE} to the same random text for every rank"
    ) from last


def _config_directory() -> Path:
    configuration = os.environ.get("XDG_CONFIG_HOME")
    return (Path(configuration) if configuration else Path.home() / ".config") / "unisono"


def _temporary_directory() -> Path:
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"unisono-{user}"


def _read_or_create(directory: Path) -> bytes:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    refuse_if_shared(directory, os.stat(directory, follow_symlinks=False), stat.S_IWGRP | stat.S_IWOTH)
    path = directory / "secret"
    if not path.exists():
        _create(path)
    with path.open("rb") as file:
        refuse_if_shared(path, os.fstat(file.fileno()), stat.S_IRWXG | stat.S_IRWXO)
        secret = file.read()
    if not secret:
        raise CommError(f"{path} is empty; remove it, and unisono creates a new secret")
    return secret


def _create(path: Path) -> None:
    """Create the file. It is written whole under another name first, so that no process ever reads a part of it."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".secret")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
        os.link(name, path)
    except FileExistsError:
        # Another process was faster; its secret is as good.
        return
    finally:
        Path(name).unlink()


def refuse_if_shared(path: Path, status: os.stat_result, forbidden: int) -> None:
    """Raise CommError if another user owns it, or has a right to it that is `forbidden` (bits of its mode)."""
    if not hasattr(os, "geteuid"):
        return
    if status.st_uid != os.geteuid():
        raise CommError(f"{path} belongs to another user (number {status.st_uid}); remove it or choose another folder")
    if status.st_mode & forbidden:
        raise CommError(f"{path} is open to other users; run `chmod go-rwx {path}`, or remove it")
