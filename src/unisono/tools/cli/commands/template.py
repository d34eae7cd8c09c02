"""Print a commented file to start from: for Slurm, torchrun, mpirun, Kubernetes, SkyPilot, Ray.

Each starts an unchanged script train.py that calls un.init().

  unisono template
  unisono template slurm > slurm.sh
"""

from __future__ import annotations

import argparse
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


def run(given: argparse.Namespace) -> int:
    """Print the template; without a name, list the names."""
    known = templates()
    if given.name is None:
        print("\n".join(sorted(known)))
    elif given.name in known:
        print(known[given.name].read_text(), end="")
    else:
        raise UsageError(f"unknown template {given.name!r}; known: {', '.join(sorted(known))}")
    return 0
