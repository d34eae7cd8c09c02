"""Writing of files that other processes may read at any time."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

__all__ = ["write_aside"]


def write_aside(path: Path, text: str, publish: Callable[[str, Path], None] = os.replace) -> None:
    """Write a file that only this user can read; it is complete before it gets its name.

    Args:
        path: The file.
        text: Its content.
        publish: Gives the written file its name: `os.replace`, or `os.link`, which fails if the name is taken.
    """
    # `mkstemp` creates the file with mode 0600.
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        publish(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
