"""Errors in the report that torchrun prints after its ranks have ended.

Each rank writes a file that torchrun reads. The first error of the ranks of a host is there in full.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["TorchrunReport"]

_FILE = "TORCHELASTIC_ERROR_FILE"
_ATTEMPTS = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
_FIRST = "unisono-first-error"
_POLL_S = 0.02


class TorchrunReport:
    """The part of this process in torchrun's report.

    Attributes:
        prints: Whether torchrun prints what is recorded: not of an attempt after which it starts the ranks again.
    """

    def __init__(self) -> None:
        path, (attempt, last) = os.environ.get(_FILE), map(os.environ.get, _ATTEMPTS)
        # The decorator `record` of torch writes the file before the hook of uncaught errors is called.
        self._path = Path(path) if path and not Path(path).exists() else None
        # As torchrun arranges them: a folder for each attempt, and in it one for each rank.
        shares = self._path is not None and self._path.name == "error.json" and attempt is not None
        self._first = self._path.parents[1] / _FIRST if self._path is not None and shares else None
        self.prints = shares and attempt == last

    @property
    def shared(self) -> bool:
        """Return whether ranks of this host see each other's errors."""
        return self._first is not None

    def claim(self, error: str) -> str | None:
        """Make this error the host's first one, and return None; or return the one that is.

        Args:
            error: A few words that other ranks refer to it by.
        """
        if self._path is None or self._first is None:
            return None
        own = self._path.with_name(_FIRST)
        try:
            own.write_text(error)
            os.link(own, self._first)
        except FileExistsError:
            return self._first.read_text()
        except OSError:
            return None
        return None

    def await_first(self, timeout_s: float) -> str | None:
        """Return the host's first error, or None if there is none within this time."""
        deadline = time.monotonic() + timeout_s
        while self._first is not None and not self._first.exists() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        with suppress(AttributeError, OSError):
            return self._first.read_text()  # type: ignore[union-attr]
        return None

    def record(self, message: str, text: str, follows: bool) -> None:
        """Write the file from which torchrun's report has its text.

        Args:
            message: The error in one line.
            text: As the report shows it.
            follows: Whether the error follows from that of another rank.
        """
        if self._path is None:
            return
        # The report calls the earliest error the cause, in whole seconds.
        details = {"py_callstack": text, "timestamp": str(int(time.time()) + follows)}
        with suppress(OSError):
            self._path.write_text(json.dumps({"message": {"message": message, "extraInfo": details}}))
