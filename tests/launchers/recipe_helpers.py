"""Files of the pages in docs/recipes, and a working directory for them with stand-ins for programs of the system."""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["FILES", "TRAIN", "env", "heard", "program"]

PAGES = Path(__file__).parents[2] / "docs" / "recipes"
BLOCK = re.compile(r'^```\w+ title="([^"]+)"\n(.*?^)```$', re.MULTILINE | re.DOTALL)
FILES: dict[str, str] = {name: text for page in PAGES.glob("*.md") for name, text in BLOCK.findall(page.read_text())}

# Prints its rank, and proves it: all ranks know of each other by the control plane.
TRAIN = """
import sys
from unisono.bootstrap import find
from unisono.core.group import Group
place = find(timeout_s=30.0)
said = place.control.exchange(Group.world(place.rank, place.size, place.name), "x", place.rank, 30.0)
sys.stdout.write(f"rank {place.rank} heard {said} {sys.argv[1:]}\\n")
sys.stdout.flush()
place.close()
"""


def program(folder: Path, name: str, text: str) -> None:
    path = folder / "bin" / name
    path.write_text(text)
    path.chmod(0o755)


def env(folder: Path, **more: str) -> dict[str, str]:
    return {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", **more}


def heard(text: str, *arguments: str, size: int = 2) -> bool:
    """Return whether every rank has learnt of every other."""
    lines = sorted(re.findall(r"rank \d+ heard .*", text))
    return lines == [f"rank {rank} heard {list(range(size))} {list(arguments)}" for rank in range(size)]
