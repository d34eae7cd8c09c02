"""Table of a machine's cost constants, used to predict the times of algorithms, and the file that stores the table."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from unisono.collectives.algorithms import ALGORITHMS
from unisono.host.files import write_aside
from unisono.host.processors import model

__all__ = ["GAP", "CostTable", "LinkCost", "TableFile", "parse_overrides"]

_log = logging.getLogger("unisono")

GAP = 0.25
"""Fraction of a message's latency that passes before its sender can send the next message: the gap of LogP (Culler et
al., 1993). Without it, any number of messages to different ranks would cost as much as one message."""

_FORMAT = 2


class LinkCost(NamedTuple):
    """Cost of a link: latency in seconds (alpha), and seconds per byte (beta).

    Example:
        >>> LinkCost(alpha=10e-6, beta=1e-9).beta
        1e-09
    """

    alpha: float
    beta: float


@dataclass(frozen=True, slots=True)
class CostTable:
    """A machine's cost constants for messages inside a host, messages between hosts, and CPU time.

    Args:
        inside: Cost of messages between ranks on one host.
        between: Cost of messages between hosts.
        gamma: Seconds to reduce one received byte.
        overhead: CPU time per message in seconds.
        measured: Whether the constants were measured; False for a transport's built-in constants.
        cores: Number of a host's cores if it has fewer cores than ranks; 0 if each rank has its own core.
        overrides: Pairs of a collective and the algorithm that "auto" uses for it, regardless of predictions.

    Example:
        >>> table = CostTable(LinkCost(1e-6, 1e-10), LinkCost(10e-6, 1e-9))
        >>> CostTable.from_json(table.to_json()) == table
        True
    """

    inside: LinkCost
    between: LinkCost
    gamma: float = 0.0
    overhead: float = 0.0
    measured: bool = True
    cores: int = 0
    overrides: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for value in (*self.inside, *self.between, self.gamma, self.overhead):
            if not 0 <= value < math.inf:
                raise ValueError(f"a constant must be a time of at least 0 s, not {value}")

    @classmethod
    def builtin(cls, latency_s: float, second_per_byte: float) -> CostTable:
        """Return a table with a transport's built-in constants, with equal costs inside a host and between hosts.

        Args:
            latency_s, second_per_byte: See `Transport`.
        """
        link = LinkCost((1 - GAP) * latency_s, second_per_byte)
        return cls(link, link, overhead=GAP * latency_s, measured=False)

    @property
    def hash(self) -> str:
        """Hash of the constants, without the overrides."""
        return hashlib.sha256(json.dumps(self._constants(), sort_keys=True).encode()).hexdigest()[:12]

    def with_overrides(self, overrides: Mapping[str, str]) -> CostTable:
        """Return this table with additional overrides, which take precedence over existing overrides.

        Args:
            overrides: An algorithm for each collective.
        """
        return replace(self, overrides=tuple(sorted((dict(self.overrides) | dict(overrides)).items())))

    def _constants(self) -> dict[str, Any]:
        links = {"inside": self.inside._asdict(), "between": self.between._asdict()}
        processor = {"gamma": self.gamma, "overhead": self.overhead, "cores": self.cores}
        return {**links, **processor, "measured": self.measured}

    def to_json(self, **further: Any) -> str:
        """Return the table as JSON, including the format's version and the table's hash.

        Args:
            further: Additional entries, which `from_json` ignores.
        """
        table = {**self._constants(), "overrides": dict(self.overrides)}
        return json.dumps({"format": _FORMAT, "hash": self.hash, **further, **table}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> CostTable:
        """Return the table from JSON written by `to_json`.

        Args:
            text: JSON.

        Raises:
            ValueError: The text is not a cost table, has a different format, or contains constants that do not match
                its hash.
        """
        try:
            found = json.loads(text)
            if found["format"] != _FORMAT:
                raise ValueError(f"format {found['format']}, not {_FORMAT}")
            inside, between = (
                LinkCost(float(found[name]["alpha"]), float(found[name]["beta"])) for name in ("inside", "between")
            )
            gamma = float(found["gamma"])
            overhead = float(found["overhead"])
            table = cls(inside, between, gamma, overhead, bool(found["measured"]), int(found["cores"]))
            table = table.with_overrides(_checked(found["overrides"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no cost table: {type(error).__name__} at {error}") from error
        if table.hash != found.get("hash"):
            raise ValueError(f"constants do not match the hash {found.get('hash')!r}")
        return table


def parse_overrides(text: str) -> dict[str, str]:
    """Parse overrides from a string such as "all_reduce=ring,broadcast=binomial".

    Args:
        text: Pairs of a collective and an algorithm, separated by commas.

    Raises:
        ValueError: A pair is malformed, or its collective or algorithm is unknown.

    Example:
        >>> parse_overrides("all_reduce=chunked_ring:segments=4")
        {'all_reduce': 'chunked_ring:segments=4'}
    """
    pairs = [pair.strip().partition("=") for pair in text.split(",") if pair.strip()]
    return _checked({collective: algorithm for collective, _, algorithm in pairs})


def _checked(overrides: Mapping[str, str]) -> dict[str, str]:
    """Return the overrides; raise `ValueError` if a collective or algorithm does not exist."""
    for collective, algorithm in overrides.items():
        if collective not in ALGORITHMS:
            raise ValueError(
                f"{collective!r} is no collective; write pairs such as all_reduce=ring, of {', '.join(ALGORITHMS)}"
            )
        _ = ALGORITHMS[collective][algorithm.partition(":")[0]]
    return dict(overrides)


_FILE = "UNISONO_TUNE_FILE"
_OVERRIDES = "UNISONO_ALGORITHM"


class TableFile:
    """File with the cost table for one backend and one distribution of ranks over hosts.

    Args:
        backend: Name of the backend.
        ranks: Number of ranks on each host.
    """

    def __init__(self, backend: str, ranks: Sequence[int]) -> None:
        self._pattern = {"backend": backend, "ranks": list(ranks), "cpu": model()}
        chosen = os.environ.get(_FILE)
        self._shared = bool(chosen)
        name = hashlib.sha256(json.dumps(self._pattern).encode()).hexdigest()[:16]
        self.path: Path = (
            Path(chosen) if chosen else _cache_folder() / "tune" / f"{backend.replace(os.sep, '_')}-{name}.json"
        )

    def load(self) -> CostTable | None:
        """Return the table, or None if the file is missing, damaged or for other hosts. Logs why a file is ignored."""
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
        """Replace the file with `table`, or log why that failed."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_aside(self.path, table.to_json(pattern=self._pattern) + "\n")
        except OSError as error:
            _log.warning("cost table %s is not stored: %s", self.path, error)

    @staticmethod
    def overrides() -> dict[str, str]:
        """Return the overrides from the environment.

        Raises:
            ValueError: The overrides are malformed.
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
