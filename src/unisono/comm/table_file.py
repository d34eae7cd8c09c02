"""Files of cost tables: one for each backend and pattern of hosts, in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from unisono.collectives.tuning.cost_table import CostTable, parse_overrides

__all__ = ["TableFile"]

_FILE, _OVERRIDES = "UNISONO_TUNE_FILE", "UNISONO_ALGORITHM"
_log = logging.getLogger("unisono")


class TableFile:
    """File of the cost table of one backend and pattern of hosts.

    Args:
        backend: Name of the backend.
        ranks: Number of ranks of each host.
    """

    def __init__(self, backend: str, ranks: Sequence[int]) -> None:
        self._pattern = {"backend": backend, "ranks": list(ranks), "cpu": _cpu_model()}
        chosen = os.environ.get(_FILE)
        self._shared = bool(chosen)
        name = hashlib.sha256(json.dumps(self._pattern).encode()).hexdigest()[:16]
        self.path = Path(chosen) if chosen else _cache_folder() / "tune" / f"{backend.replace(os.sep, '_')}-{name}.json"

    def load(self) -> CostTable | None:
        """Return the table; None if there is no file, or, with a line in the log, if it is damaged or foreign."""
        try:
            text = self.path.read_text(encoding="utf-8")
            table = CostTable.from_json(text)
            if not self._shared and json.loads(text).get("pattern") != self._pattern:
                raise ValueError("it belongs to other hosts")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _log.warning("cost table %s is ignored: %s", self.path, error)
            return None
        return table

    def store(self, table: CostTable) -> None:
        """Replace the file, or write a line to the log if that is not possible."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Created with mode 0600.
            handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(table.to_json(pattern=self._pattern) + "\n")
                Path(temporary).replace(self.path)
            except BaseException:
                with suppress(OSError):
                    Path(temporary).unlink()
                raise
        except OSError as error:
            _log.warning("cost table %s is not stored: %s", self.path, error)

    @staticmethod
    def overrides() -> dict[str, str]:
        """Return the overrides of the environment.

        Raises:
            ValueError: They are malformed.
        """
        try:
            return parse_overrides(os.environ.get(_OVERRIDES, ""))
        except ValueError as error:
            raise ValueError(f"{_OVERRIDES}: {error}") from None


def _cache_folder() -> Path:
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (given if given.is_absolute() else Path.home() / ".cache") / "unisono"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"unisono-{os.getuid()}"


@cache
def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
