"""Places for checkpoints: a directory of this host, or what fsspec reaches (`s3://...`, `memory://...`)."""

from __future__ import annotations

import os
import re

from unisono.checkpoint.storage.storage import Sink, Source, Storage

__all__ = ["Sink", "Source", "Storage", "storage_at"]

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)


def storage_at(path: str | os.PathLike[str] | Storage) -> Storage:
    """The storage for a path, a URL, or a storage of your own, which is returned unchanged.

    Example:
        >>> storage_at("/tmp/run-7").name
        'run-7'
    """
    if not isinstance(path, (str, os.PathLike)):
        if not hasattr(path, "publish"):
            raise TypeError(f"a path must be a str, a pathlib.Path or a storage, not a {type(path).__name__}")
        return path
    text = os.fspath(path)
    if not isinstance(text, str) or not text:
        raise TypeError(f"a path must be a non-empty str or a pathlib.Path, not {text!r}")
    scheme = _URL.match(text)
    if scheme and scheme[1] != "file":
        from unisono.checkpoint.storage.fsspec import FsspecStorage

        return FsspecStorage(text)
    from unisono.checkpoint.storage.local import LocalStorage

    return LocalStorage(text.removeprefix("file://"))
