"""Command line: `unisono <command>`, or `python -m unisono <command>`."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from unisono import __version__
from unisono.core.registry import Registry
from unisono.errors import CommError, UnavailableError

__all__ = ["COMMANDS", "Command", "UsageError", "main", "make_parser", "numbers", "refusing"]


class Command(Protocol):
    """A module in `unisono.tools.cli.commands`, named after the command; the module's docstring is the help text."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments of the command."""
        ...

    def run(self, given: argparse.Namespace) -> int:
        """Run the command, and return the exit status. Raises `UsageError` if the arguments are invalid or unusable."""
        ...


class UsageError(Exception):
    """Error for invalid or unusable arguments, with exit status 2. The text is a sentence that names alternatives."""


@contextmanager
def refusing(*kinds: type[Exception]) -> Iterator[None]:
    """Convert errors of the given classes to a `UsageError` with the same text."""
    try:
        yield
    except kinds as error:
        raise UsageError(str(error)) from error


def numbers(options: Iterable[str]) -> dict[str, int]:
    """Parse the options of an algorithm, each of the form NAME=NUMBER.

    Example:
        >>> numbers(["segments=4"])
        {'segments': 4}
    """
    found = {}
    for text in options:
        name, _, value = text.partition("=")
        if not value.isdecimal():
            raise UsageError(f"--option takes NAME=NUMBER, such as segments=4, not {text!r}")
        found[name] = int(value)
    return found


COMMANDS: Registry[Command] = Registry("command", "unisono.tools.cli.commands")
"""Registry of commands: files in `commands`, and other packages' entry points in `unisono.tools.cli.commands`."""

_FAILED = 1
_REFUSED = 2
_INTERRUPTED = 130
_UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EIO)
_STATUSES = "exit status: 0 ok, 1 failed, 2 usage error, 130 interrupted"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return the exit status.

    The exit status is 0 for success, 1 for a failure, 2 for invalid or unusable arguments, and 130 for an interrupt.
    With status 2, a sentence on standard error names alternatives.

    Args:
        argv: Arguments after the program's name; if None, the arguments of this process.

    Raises:
        SystemExit: Raised by argparse after --help and --version, and for unknown options.

    Example:
        >>> main(["--version"])
        Traceback (most recent call last):
        ...
        SystemExit: 0
    """
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return _INTERRUPTED


def _run(words: Sequence[str]) -> int:
    parser = make_parser(words[:1])
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
    except OSError as error:
        if error.errno not in _UNWRITABLE or error.filename is not None:
            raise
        # Redirect standard output to /dev/null, because Python would try to write the remaining output again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # Don't print an error if the reader has closed the pipe, because it does not want more output.
        closed = error.errno == errno.EPIPE
        return _FAILED if closed else _complain(given.command, f"cannot print: {error.strerror}", _FAILED)


def make_parser(loaded: Collection[str]) -> argparse.ArgumentParser:
    """Return the parser for all commands. Only commands in `loaded` are imported, because some commands import torch.

    Args:
        loaded: Names of the commands whose arguments the parser knows.

    Example:
        >>> make_parser(["verify"]).parse_args(["verify", "ring"]).algorithm
        'ring'
    """
    shown = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="unisono",
        description="Distributed training for plain PyTorch loops.",
        epilog=f"unisono <command> --help shows examples. {_STATUSES.capitalize()}.",
    )
    parser.add_argument("--version", action="version", version=f"unisono {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="<command>")
    for name in COMMANDS.names():
        one = commands.add_parser(name, help=COMMANDS.summary(name), formatter_class=shown, epilog=_STATUSES)
        if name in loaded:
            command = COMMANDS[name]
            one.description = command.__doc__
            command.add_arguments(one)
    return parser


def _complain(command: str, error: Exception | str, status: int) -> int:
    print(f"unisono {command}: {error}", file=sys.stderr)
    return status
