"""The HTML page of a replay: the template, with the replay as JSON inside it."""

from __future__ import annotations

import html
import json
import re
from dataclasses import fields
from importlib.resources import files
from os import PathLike
from pathlib import Path

from unisono.lab.player.replay import Change, Replay
from unisono.lab.simulator import Message

__all__ = ["render", "write"]


def render(replay: Replay) -> str:
    """Return the page: it loads nothing, and works as a file.

    Example:
        >>> page = render(Replay("nothing moves", "", ("rank 0",)))
        >>> "<title>nothing moves</title>" in page
        True
    """
    data = {field.name: getattr(replay, field.name) for field in fields(replay)}
    data["fields"] = {"messages": Message._fields, "changes": Change._fields}
    # No "<" or "&" is left that the browser's parser could take for markup.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    text = re.sub("[<>&]", lambda found: f"\\u{ord(found[0]):04x}", text)
    parts = {"title": html.escape(replay.title), "data": text}
    template = (files(__package__) / "templates" / "player.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(title|data)\}\}", lambda found: parts[found[1]], template)


def write(replay: Replay, path: str | PathLike[str]) -> None:
    """Write the page to a file; an existing one is replaced.

    Args:
        replay: What it shows.
        path: The file.
    """
    Path(path).write_text(render(replay), encoding="utf-8")
