"""The file that ranks of one host meet by: file:///path."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from unisono.bootstrap import file as meeting
from unisono.errors import CommError

REFUSALS = (ValueError, CommError)
MEMORY = (1 << 20, 20)

_FOLDER = tempfile.TemporaryDirectory(prefix="unisono-fuzz-")
_PATH = Path(_FOLDER.name) / "meet"


def seeds() -> list[bytes]:
    texts = [
        meeting.RendezvousFile(host, port, "secret", "host").text() for host, port in (("127.0.0.1", 1), ("::1", 65535))
    ]
    return [text.encode() for text in texts]


def run(data: bytes) -> None:
    descriptor = os.open(_PATH, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    note = meeting.read(_PATH)
    if note is not None:
        # A connection to this address can be requested.
        assert 0 < note.port < 1 << 16
        assert note.host.isprintable()
