"""Attach to a job whose ranks un.breakpoint() holds, and look at any of them.

unisono debug                (the only job of this user that is held on this host)
unisono debug 12345          (the job of a process)
unisono debug 12345 --rank 3
"""

from __future__ import annotations

import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the process, and the rank."""
    parser.add_argument("pid", type=int, nargs="?", help="a process of the job (default: the only job that is held)")
    parser.add_argument("--rank", type=int, help="the rank to look at first (default: the first one)")


def run(given: argparse.Namespace) -> int:
    """Show the prompt until the ranks are let go."""
    from unisono.debugger import attach
    from unisono.debugger.prompt import Prompt

    with attach(given.pid) as session:
        Prompt(session, given.rank).cmdloop()
    return 0
