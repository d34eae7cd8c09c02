"""Griffe extension: the docstrings' one-line sections ("Cost: ...", "Returns: ...") in the form that griffe parses."""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["Sections", "normalize"]

PARSED = {"Args", "Attributes", "Raises", "Returns", "Yields"}
NOTES = re.compile(r"(Balance|Collective|Cost|Method|Provisional): ")
ERRORS = re.compile(r"(\s*[A-Z]\w+(?:, [A-Z]\w+)*) (?![\w, ]+:)")
SEVERAL = re.compile(r"(    )(\*{0,2}\w+(?:, \*{0,2}\w+)+): (.*)", re.DOTALL)


def normalize(docstring: str) -> str:
    """Return the docstring with every section under a title of its own."""
    lines: list[str] = []
    title = ""
    for line in docstring.splitlines():
        head, colon, text = line.partition(": ")
        if NOTES.match(line):
            title, line = "", f"**{head}:** {text}"
        elif colon and head in PARSED:
            title, line = head, f"{head}:\n    {_error(head, text)}"
        elif title and line and not line[0].isspace() and not line.endswith(":"):
            # The paragraph under a one-line title goes on.
            line = f"    {line}" if lines and lines[-1].strip() else line
        elif not line.strip():
            title = ""
        elif line == "Example:":
            line = "Examples:"
        lines.append(line)
    return "\n".join(lines)


def _error(title: str, text: str) -> str:
    """Separate the errors from the condition: "ValueError otherwise." has no colon."""
    return ERRORS.sub(r"\1: ", text, count=1) if title == "Raises" else text


class Sections(griffe.Extension):
    """Normalizes each docstring when griffe has read its object."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = normalize(obj.docstring.value)
