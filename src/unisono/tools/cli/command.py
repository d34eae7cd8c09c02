"""What a command of the command line is."""

from __future__ import annotations

import argparse
from typing import Protocol

__all__ = ["Command", "UsageError"]


class Command(Protocol):
    """A file of `unisono.tools.cli.commands`: its name is the command's, its docstring's first line the help."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare what the command takes."""
        ...

    def run(self, given: argparse.Namespace) -> int:
        """Do it, and return the exit status. Raises `UsageError` if it cannot be done as asked."""
        ...


class UsageError(Exception):
    """What was asked for cannot be; the text is one sentence that says what can. Exit status 2."""
