"""Attach to a job whose ranks are held by un.breakpoint(), and inspect any of them.

At its prompt, `help` lists the commands; anything else is evaluated on the chosen rank.

  unisono debug                (the only job of this user that is held on this host)
  unisono debug 12345          (the job of a process)
  unisono debug 12345 --rank 3
  unisono debug --json
"""

from __future__ import annotations

import argparse
import json
from contextlib import suppress

from unisono.tools.cli import refusing

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the process, and the rank."""
    add = parser.add_argument
    add(
        "pid", type=int, nargs="?", help="a process of the job, or what started it (default: the only job that is held)"
    )
    add("--rank", type=int, help="the rank to look at first (default: the one that stopped)")
    add("--json", action="store_true", help="print where each rank is as JSON, and leave the ranks held")


def run(given: argparse.Namespace) -> int:
    """Show the prompt until the ranks continue."""
    from unisono.debugger import attach
    from unisono.debugger.prompt import Prompt

    with attach(given.pid) as session:
        if given.json:
            print(json.dumps({"reason": session.reason, "ranks": session.ranks()}, indent=2))
        else:
            with refusing(ValueError):
                prompt = Prompt(session, given.rank)
            # An interrupt leaves the ranks held, like end of input.
            with suppress(KeyboardInterrupt):
                prompt.cmdloop()
    return 0
