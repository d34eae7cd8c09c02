"""Defines the data that the player shows: the replay of an algorithm, a simulation or a recorded run."""

from __future__ import annotations

import html
import json
import re
from dataclasses import dataclass, fields
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from unisono.lab.simulator import Message

__all__ = ["MOST_CHUNKS", "MOST_MESSAGES", "MOST_RANKS", "Change", "Replay", "render", "write"]

MOST_RANKS = 32
MOST_CHUNKS = 128
MOST_MESSAGES = 20_000
"""Limits that keep pages legible and animations smooth."""


class Change(NamedTuple):
    """New contents of a rank's chunk, valid from a given time on.

    Attributes:
        time_s: Time of the change, in the unit of the messages' times.
        rank, chunk: Indices of the rank and of its chunk.
        members: Bit mask of the ranks whose contributions the chunk now contains; bit r is the rank at position r.

    Example:
        >>> Change(time_s=1.0, rank=0, chunk=2, members=0b101)
        Change(time_s=1.0, rank=0, chunk=2, members=5)
    """

    time_s: float
    rank: int
    chunk: int
    members: int


@dataclass(frozen=True, slots=True)
class Replay:
    """Messages between ranks, and the contents of each rank's chunks over time. Validated on construction.

    Attributes:
        title: Heading of the page.
        about: A sentence below the heading; may be empty.
        ranks: Name of each rank.
        chunks: Name of each chunk, equal on all ranks; empty if the chunks are unknown.
        messages: The messages, ordered by start time.
        start: For each rank, the initial `members` of each chunk; see `Change`.
        changes: Later changes of chunks, ordered by time.
        goal: For each rank, the required final `members` of each chunk; 0 if any contents are allowed.
        unit: "round" or "s": the unit of all times.

    Raises:
        ValueError: There are too many ranks, chunks or messages to show.

    Example:
        >>> sent = Message(0, 1, ((0, 1),), nbytes=8, start_s=0, end_s=1, reduce=False, step=1)
        >>> replay = Replay("copy", "", ("rank 0", "rank 1"), ("0",), (sent,), ((1,), (0,)),
        ...                 (Change(1, rank=1, chunk=0, members=1),), goal=((1,), (1,)))
        >>> replay.goal[1][0] == replay.changes[-1].members
        True
    """

    title: str
    about: str
    ranks: tuple[str, ...]
    chunks: tuple[str, ...] = ()
    messages: tuple[Message, ...] = ()
    start: tuple[tuple[int, ...], ...] = ()
    changes: tuple[Change, ...] = ()
    goal: tuple[tuple[int, ...], ...] = ()
    unit: str = "round"

    def __post_init__(self) -> None:
        limits = (
            ("ranks", len(self.ranks), MOST_RANKS, "pass fewer ranks"),
            ("chunks", len(self.chunks), MOST_CHUNKS, "pass fewer ranks or segments"),
            ("messages", len(self.messages), MOST_MESSAGES, "record a shorter part of the run"),
        )
        for what, number, most, advice in limits:
            if number > most:
                raise ValueError(f"the player shows at most {most} {what}, not {number}; {advice}")


def render(replay: Replay) -> str:
    """Return the replay's HTML page, which loads no other files and works offline.

    Example:
        >>> page = render(Replay("nothing moves", "", ("rank 0",)))
        >>> "<title>nothing moves</title>" in page
        True
    """
    data = {field.name: getattr(replay, field.name) for field in fields(replay)}
    data["fields"] = {"messages": Message._fields, "changes": Change._fields}
    # Escape "<" and "&", which the browser's parser could mistake for markup.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    text = re.sub("[<>&]", lambda found: f"\\u{ord(found[0]):04x}", text)
    parts = {"title": html.escape(replay.title), "data": text}
    template = (files(__package__) / "templates" / "player.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(title|data)\}\}", lambda found: parts[found[1]], template)


def write(replay: Replay, path: str | PathLike[str]) -> None:
    """Write the page to a file; an existing file is replaced.

    Args:
        replay: The replay to show.
        path: The file.
    """
    Path(path).write_text(render(replay), encoding="utf-8")
