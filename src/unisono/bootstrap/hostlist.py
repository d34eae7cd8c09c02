"""Lists of hosts as Slurm writes them: `node[001-004,7],gpu-a` is six names.

    list   = item {"," item}
    item   = part {part}                    parts are multiplied: a[1-2]b[3-4] is four names
    part   = text | "[" choice {"," choice} "]"
    choice = number | number "-" number | item

A range keeps the width of its first number: `[08-10]` is 08, 09, 10. A choice may be an item
itself, brackets and all: `rack[1,2-[a,b]]` is rack1, rack2-a, rack2-b.
"""

from __future__ import annotations

import re
from collections.abc import Callable

__all__ = ["MAX_HOSTS", "expand"]

MAX_HOSTS = 65536
"""A longer list is taken for a mistake, as Slurm itself does."""

_MAX_DEPTH = 32
_RANGE = re.compile(r"([0-9]{1,18})-([0-9]{1,18})(?=[,\]])")
_TEXT = re.compile(r"[^\[\],\s]+")


def expand(hostlist: str) -> list[str]:
    """The names that a list of hosts stands for, in its order.

    Raises:
        ValueError: It is not well formed (says where), or stands for more than `MAX_HOSTS` names.

    Example:
        >>> expand("node[001-003,7],gpu-a")
        ['node001', 'node002', 'node003', 'node7', 'gpu-a']
    """
    return _Reader(hostlist.strip()).read()


class _Reader:
    """Reads from left to right; one method for each rule of the grammar."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth = text, 0, 0

    def read(self) -> list[str]:
        names = self._separated(self._item)
        if self._at < len(self._text):
            raise self._error("a name, a comma or the end")
        return names

    def _separated(self, rule: Callable[[], list[str]]) -> list[str]:
        names = rule()
        while self._took(","):
            names += rule()
            self._bound(len(names))
        return names

    def _item(self) -> list[str]:
        names = None
        while (endings := self._part()) is not None:
            if names is None:
                names = endings
            else:
                self._bound(len(names) * len(endings))
                names = [name + ending for name in names for ending in endings]
        if names is None:
            raise self._error("a name")
        return names

    def _part(self) -> list[str] | None:
        text = self._matched(_TEXT)
        if text is not None:
            return [text[0]]
        if not self._took("["):
            return None
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error(f"at most {_MAX_DEPTH} nested brackets")
        names = self._separated(self._choice)
        if not self._took("]"):
            raise self._error("a comma or ]")
        self._depth -= 1
        return names

    def _choice(self) -> list[str]:
        numbers = self._matched(_RANGE)
        if numbers is None:
            return self._item()
        first, last = int(numbers[1]), int(numbers[2])
        if first > last:
            raise ValueError(f"{self._text!r} is not a list of hosts: the range {numbers[0]} goes down")
        self._bound(last - first + 1)
        return [str(number).zfill(len(numbers[1])) for number in range(first, last + 1)]

    def _took(self, mark: str) -> bool:
        taken = self._text.startswith(mark, self._at)
        self._at += taken
        return taken

    def _matched(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self._text, self._at)
        if match is not None:
            self._at = match.end()
        return match

    def _bound(self, count: int) -> None:
        """Called before names are made, so that a short text cannot fill the memory."""
        if count > MAX_HOSTS:
            raise ValueError(f"{self._text!r} stands for {count} hosts or more; at most {MAX_HOSTS} are allowed")

    def _error(self, expected: str) -> ValueError:
        found = repr(self._text[self._at :][:20]) if self._at < len(self._text) else "the end"
        return ValueError(
            f"{self._text!r} is not a list of hosts: expected {expected} at {found} (position {self._at})"
        )
