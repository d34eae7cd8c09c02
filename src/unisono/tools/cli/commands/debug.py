"""Attach to a job whose ranks wait in un.breakpoint(), and inspect any of the ranks.

At the prompt, `help` lists the commands; all other input is evaluated on the chosen rank.

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
    """Add the arguments: the process, and the rank."""
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
            # Ctrl-C, like the end of input, ends the prompt, but the ranks keep waiting at the breakpoint.
            with suppress(KeyboardInterrupt):
                prompt.cmdloop()
    return 0
