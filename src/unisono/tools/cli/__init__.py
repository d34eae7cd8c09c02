"""The command line: `unisono <command>`, also as `python -m unisono <command>`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Protocol

from unisono import __version__
from unisono.core.registry import Registry
from unisono.errors import CommError, UnavailableError

__all__ = ["COMMANDS", "Command", "UsageError", "main"]


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


COMMANDS: Registry[Command] = Registry("command", "unisono.tools.cli.commands")
"""A new command is one new file, or an entry point `unisono.tools.cli.commands` of another package."""

_FAILED, _REFUSED, _INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return the exit status.

    0 is success, 1 failure, 2 an impossible request (a sentence on standard error states the
    alternatives), 130 interrupted.

    Args:
        argv: Arguments after the program's name; from the command line if None.

    Raises:
        SystemExit: As in argparse: after --help and --version, and for unknown options.

    Example:
        >>> main(["--version"])
        Traceback (most recent call last):
        ...
        SystemExit: 0
    """
    words = sys.argv[1:] if argv is None else argv
    parser = _parser(words[0] if words else None)
    given = parser.parse_args(words)
    if given.command is None:
        parser.print_help(sys.stderr)
        return _REFUSED
    try:
        status = COMMANDS[given.command].run(given)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except (UsageError, UnavailableError) as error:
        return _complain(given.command, error, _REFUSED)
    except CommError as error:
        return _complain(given.command, error, _FAILED)
    except BrokenPipeError:
        # The reader of the output has closed the pipe; at exit Python would try again to write the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED
    except KeyboardInterrupt:
        return _INTERRUPTED


def _parser(wanted: str | None) -> argparse.ArgumentParser:
    """Return the parser of all commands. With `wanted`, the others stay unloaded, because some import torch."""
    parser = argparse.ArgumentParser(prog="unisono", description="Distributed training for plain PyTorch loops.")
    parser.add_argument("--version", action="version", version=f"unisono {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="<command>")
    names = COMMANDS.names()
    for name in names:
        if wanted in names and name != wanted:
            commands.add_parser(name)
            continue
        command = COMMANDS[name]
        summary, _, _ = (command.__doc__ or "").partition("\n")
        command.add_arguments(commands.add_parser(name, help=summary, description=command.__doc__))
    return parser


def _complain(command: str, error: Exception, status: int) -> int:
    print(f"unisono {command}: {error}", file=sys.stderr)
    return status
