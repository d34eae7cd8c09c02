"""Report every rank's last call and line from the files of $UNISONO_EVENTS, and the rank that stopped first."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from unisono.diagnostics.event_log import Event, read_events
from unisono.tools.cli import UsageError

__all__ = ["add_arguments", "run"]


@dataclass(frozen=True, slots=True)
class _Rank:
    rank: int
    pid: int
    events: list[Event]

    @property
    def last(self) -> Event:
        return self.events[-1]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options: the folder of the files, and the number of events."""
    parser.add_argument("directory", type=Path, help="folder that UNISONO_EVENTS named")
    parser.add_argument(
        "--last", type=int, default=12, help="number of last events to list, over all ranks (%(default)s)"
    )


def run(given: argparse.Namespace) -> int:
    """Merge the files and print a summary; return 1 if a rank did not end normally."""
    ranks = _ranks(given.directory)
    end = max(rank.last.time_s for rank in ranks)
    for rank in ranks:
        print(
            f"rank {rank.rank} (process {rank.pid}) {_state(rank.last)}, {end - rank.last.time_s:.3f} s before the end"
        )
    stopped = [rank for rank in ranks if rank.last.kind != "end"]
    if stopped:
        print(f"look at {_suspect(ranks)}")
    merged = sorted(((rank, event) for rank in ranks for event in rank.events), key=lambda pair: pair[1].time_s)
    print("the last events:")
    for rank, event in merged[max(0, len(merged) - given.last) :]:
        clock = datetime.fromtimestamp(event.time_s, UTC).strftime("%H:%M:%S.%f")
        print(f"  {clock} rank {rank.rank} {event.kind:5} {event.text} [{event.group}]")
    return 1 if stopped else 0


def _ranks(directory: Path) -> list[_Rank]:
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory; pass the folder that UNISONO_EVENTS named")
    found = []
    for path in sorted(directory.glob("*.events")):
        try:
            pid, rank, events = read_events(path)
        except (ValueError, OSError) as error:
            raise UsageError(str(error)) from error
        if events:
            found.append(_Rank(rank, pid, events))
    if not found:
        raise UsageError(f"{directory} holds no events; run the job with UNISONO_EVENTS={directory}")
    return sorted(found, key=lambda rank: (rank.rank, rank.last.time_s))


def _state(event: Event) -> str:
    if event.kind == "enter":
        return f"ended in {event.text} of {event.group}"
    if event.kind == "leave":
        return f"ended outside of any call, after {event.text} of {event.group}"
    if event.kind == "error":
        return f"failed: {event.text}"
    return "ended normally"


def _suspect(ranks: list[_Rank]) -> str:
    """Describe the rank that stopped first, or that is behind the others."""
    first = min((rank for rank in ranks if rank.last.kind != "end"), key=lambda rank: (_failed(rank), _last_done(rank)))
    return f"rank {first.rank}, the first to stop: it {_state(first.last)}"


def _failed(rank: _Rank) -> bool:
    """Return whether the rank still reported an error: then another rank most likely stopped earlier."""
    return any(event.kind == "error" for event in rank.events)


def _last_done(rank: _Rank) -> float:
    return rank.last.time_s
