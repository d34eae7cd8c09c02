"""The command line: `unisono <command>`, also as `python -m unisono <command>`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from unisono import __version__
from unisono.cli.command import Command, Refusal
from unisono.errors import CommError, UnavailableError
from unisono.registry import Registry

__all__ = ["COMMANDS", "main"]

COMMANDS: Registry[Command] = Registry("command", "unisono.cli.commands")
"""A new command is one new file, or an entry point `unisono.cli.commands` of another package."""

_FAILED, _REFUSED, _INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return the exit status.

    0 is done, 1 failed, 2 asked for something that cannot be (one sentence on standard error says
    what can), 130 interrupted.

    Args:
        argv: What follows the program's name; from the command line if None.

    Raises:
        SystemExit: As argparse does: after --help and --version, and for unknown options.

    Example:
        >>> main(["--version"])
        Traceback (most recent call last):
        ...
        SystemExit: 0
    """
    parser = _parser()
    given = parser.parse_args(argv)
    if given.command is None:
        parser.print_help(sys.stderr)
        return _REFUSED
    try:
        return COMMANDS[given.command].run(given)
    except (Refusal, UnavailableError) as error:
        return _complain(given.command, error, _REFUSED)
    except CommError as error:
        return _complain(given.command, error, _FAILED)
    except KeyboardInterrupt:
        return _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="unisono", description="Distributed training for plain PyTorch loops.")
    parser.add_argument("--version", action="version", version=f"unisono {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="<command>")
    for name in COMMANDS.names():
        command = COMMANDS[name]
        summary, _, _ = (command.__doc__ or "").partition("\n")
        command.add_arguments(commands.add_parser(name, help=summary, description=command.__doc__))
    return parser


def _complain(command: str, error: Exception, status: int) -> int:
    print(f"unisono {command}: {error}", file=sys.stderr)
    return status
