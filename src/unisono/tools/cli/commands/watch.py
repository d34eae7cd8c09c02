"""Watch a training run on torch's own process groups: if calls differ between ranks, report them instead of hanging.

The command and the processes that it starts run unchanged, with UNISONO_WATCH in their environment.

  unisono watch -- torchrun --nproc-per-node 2 train.py
  unisono watch --check before --timeout 60 -- torchrun --nproc-per-node 2 train.py
"""

from __future__ import annotations

import argparse
import os

from unisono.tools.cli import UsageError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options and the command."""
    add = parser.add_argument
    add("--check", choices=["after", "before"], default="after", help="when calls are compared (default: after)")
    add("--timeout", type=float, help="seconds after which missing ranks are named (default: 9/10 of the group's own)")
    add("words", nargs="+", metavar="command", help="what to run, after --")


def run(given: argparse.Namespace) -> int:
    """Replace this process with the command."""
    if given.timeout is not None and not given.timeout > 0:
        raise UsageError(f"--timeout takes a positive number of seconds, not {given.timeout:g}")
    settings = {"UNISONO_WATCH": given.check}
    if given.timeout is not None:
        settings["UNISONO_WATCH_TIMEOUT"] = str(given.timeout)
    try:
        os.execvpe(given.words[0], given.words, {**os.environ, **settings})
    except OSError as error:
        raise UsageError(f"cannot run {given.words[0]!r}: {error.strerror}") from error
