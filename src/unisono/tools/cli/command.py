"""Interface of a command of the command line."""

from __future__ import annotations

import argparse
from typing import Protocol

__all__ = ["Command", "UsageError"]


class Command(Protocol):
    """A file of `unisono.tools.cli.commands`: its name is the command's, its docstring's first line the help."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments of the command."""
        ...

    def run(self, given: argparse.Namespace) -> int:
        """Run the command, and return the exit status. Raises `UsageError` if the request is impossible."""
        ...


class UsageError(Exception):
    """An impossible request; the text is one sentence that states the alternatives. Exit status 2."""
