"""Print a commented file to start from: for Slurm, torchrun, mpirun, Kubernetes, SkyPilot, Ray.

Each starts an unchanged script train.py that calls un.init().

  unisono template
  unisono template slurm > slurm.sh
"""

from __future__ import annotations

import argparse
import json
from importlib.resources import files
from importlib.resources.abc import Traversable

from unisono.tools.cli import UsageError

__all__ = ["add_arguments", "run", "templates"]


def templates() -> dict[str, Traversable]:
    """Return the templates by name. A new one is one new file in `unisono/tools/cli/templates`.

    Example:
        >>> sorted(templates())
        ['kubernetes', 'mpirun', 'ray', 'skypilot', 'slurm', 'torchrun']
    """
    return {file.name.partition(".")[0]: file for file in (files("unisono.tools.cli") / "templates").iterdir()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument: the name of the template."""
    parser.add_argument("name", nargs="?", help=f"{', '.join(sorted(templates()))}; lists them if left out")
    parser.add_argument("--json", action="store_true", help="print the names, or the template's text, as JSON")


def run(given: argparse.Namespace) -> int:
    """Print the template; without a name, list the names."""
    known = templates()
    if given.name is not None and given.name not in known:
        raise UsageError(f"unknown template {given.name!r}; known: {', '.join(sorted(known))}")
    found = sorted(known) if given.name is None else known[given.name].read_text()
    if given.json:
        print(json.dumps(found if given.name is None else {"name": given.name, "text": found}, indent=2))
    else:
        print(found if isinstance(found, str) else "\n".join(found), end="" if given.name else "\n")
    return 0
