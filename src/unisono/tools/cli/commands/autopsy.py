"""Report each rank's last call and source line from the files in $UNISONO_EVENTS, and which rank stopped first.

The report distinguishes killed ranks (whose process is gone, without an error), failed ranks and ranks that are still
running.

  UNISONO_EVENTS=/tmp/events torchrun --nproc-per-node 4 train.py
  unisono autopsy /tmp/events
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from unisono.diagnostics.event_log import LoggedEvent, read_events
from unisono.tools.cli import UsageError, refusing

__all__ = ["add_arguments", "run"]

_ORDER = ("killed", "failed", "unknown", "stopped", "running", "left", "ended later", "consequence")
"""States of ranks that did not end normally, from the most to the least likely state of the rank that stopped first."""
_CONSEQUENCES = ("PeerLostError", "AbortedError", "CommTimeoutError", "DeadlockError")
_TEXTS = {
    "ended": "ended normally",
    "killed": "was killed or crashed: its process is gone without an error,",
    "ended later": "was ended after another rank had failed: its process is gone without an error,",
    "unknown": "recorded no end",
    "stopped": "is stopped by a signal (SIGSTOP, SIGTSTP)",
    "running": "still runs",
    "left": "left without closing its communicator",
}


@dataclass(frozen=True, slots=True)
class _RankLog:
    rank: int
    pid: int
    process: str | None
    events: list[LoggedEvent]

    @property
    def last(self) -> LoggedEvent:
        return self.events[-1]

    @property
    def error(self) -> LoggedEvent | None:
        return next((event for event in self.events if event.kind == "error"), None)

    @property
    def state(self) -> str:
        """The rank's last state: "ended" if it ended normally, or one of the states in `_ORDER`."""
        if self.error is not None:
            return "consequence" if self.error.text.startswith(_CONSEQUENCES) else "failed"
        ends = {"end": "ended", "exit": "left"}
        processes = {"gone": "killed", "later": "ended later", None: "unknown"}
        return ends.get(self.last.kind) or processes.get(self.process, str(self.process))

    @property
    def text(self) -> str:
        """The rank's last state and call, as text."""
        if self.error is not None:
            return f"failed: {self.error.text}"
        calls = [event for event in self.events if event.kind in {"enter", "leave"}]
        if self.state == "ended" or not calls:
            return _TEXTS[self.state]
        last = calls[-1]
        where = "in" if last.kind == "enter" else "outside of any call, after"
        return f"{_TEXTS[self.state]} {where} {last.text} of {last.group}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "pid": self.pid,
            "state": self.state,
            "text": self.text,
            "events": [asdict(event) for event in self.events],
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options: the folder with the files, and the number of events."""
    parser.add_argument("directory", type=Path, help="folder that UNISONO_EVENTS named")
    parser.add_argument(
        "--last", type=int, default=12, metavar="N", help="number of last events to list, over all ranks (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print all ranks and events as JSON")


def run(given: argparse.Namespace) -> int:
    """Merge the files, and print a summary. Return 1 if a rank did not end normally."""
    ranks = _ranks(given.directory)
    first = min(
        (rank for rank in ranks if rank.state != "ended"),
        key=lambda rank: (_ORDER.index(rank.state), (rank.error or rank.last).time_s),
        default=None,
    )
    if given.json:
        found = {"first": first and first.rank, "ranks": [rank.to_dict() for rank in ranks]}
        print(json.dumps(found, indent=2))
    else:
        _print(ranks, first, given.last)
    return 0 if first is None or all(rank.state in {"ended", "left"} for rank in ranks) else 1


def _print(ranks: list[_RankLog], first: _RankLog | None, count: int) -> None:
    end = max(rank.last.time_s for rank in ranks)
    for rank in ranks:
        print(f"rank {rank.rank} (process {rank.pid}) {rank.text}, {end - rank.last.time_s:.3f} s before the end")
    if first is not None:
        print(f"look at rank {first.rank}, the first to stop: it {first.text}")
    merged = sorted(((rank, event) for rank in ranks for event in rank.events), key=lambda pair: pair[1].time_s)
    print("the last events:")
    for rank, event in merged[max(0, len(merged) - count) :]:
        clock = datetime.fromtimestamp(event.time_s, UTC).strftime("%H:%M:%S.%f")
        print(f"  {clock} rank {rank.rank} {event.kind:5} {event.text} [{event.group}]")


def _ranks(directory: Path) -> list[_RankLog]:
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory; pass the folder that UNISONO_EVENTS named")
    found = []
    for path in sorted(directory.glob("*.events")):
        with refusing(ValueError, OSError):
            pid, rank, events, state = read_events(path)
            if events:
                found.append(_RankLog(rank, pid, state, events))
    if not found:
        raise UsageError(f"{directory} holds no events; run the job with UNISONO_EVENTS={directory}")
    return sorted(_marked(found), key=lambda rank: (rank.rank, rank.last.time_s))


def _marked(ranks: list[_RankLog]) -> list[_RankLog]:
    """Mark ranks whose process the launcher ended because another rank had already failed."""
    if not any(rank.state == "failed" for rank in ranks):
        return ranks
    errors = " ".join(rank.error.text for rank in ranks if rank.error is not None)
    missed = {int(number) for number in re.findall(r"rank (\d+) was (?:lost|ended)", errors)}
    return [
        replace(rank, process="later") if rank.state == "killed" and rank.rank not in missed else rank for rank in ranks
    ]
