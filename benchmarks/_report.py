"""Run every benchmark in this folder, and write the results to docs/benchmarks.md.

    python benchmarks/_report.py [--only mpi_against_bare ...]

With `--only`, the other results stay unchanged: each has its own date and machine.
The machine should be otherwise idle.
"""

from __future__ import annotations

import ast
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from _questions import parser

from unisono.tools import bench

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
COMMAND = re.compile(r"^`python benchmarks/(\w+\.py)`", re.MULTILINE)
HEAD = """\
# Benchmarks

What `make bench` measured. Ratios are medians of neighbouring samples in one run, with quartiles; every result was
verified. A line with MISSED did not keep its bound in that run.

On a virtual machine the same program can take several times as long for minutes at a time, when the host has
put the two processors far from each other: what one processor has just written is then slow to read for the other.
"""


def questions(only: list[str]) -> list[Path]:
    """Return the scripts in order, or only those named, if any."""
    scripts = sorted(path for path in HERE.glob("*.py") if not path.name.startswith("_"))
    return [path for path in scripts if not only or path.stem in only]


def machine() -> str:
    """Return the date and the machine of the measurement."""
    system = f"{platform.system()} {platform.release().split('-')[0]}"
    here = bench.machine()
    python = f"Python {here['python']}, torch {here['torch']}"
    return f"{datetime.now(UTC).date()}, {here['processors']} cores ({here['processor']}), {system}, {python}"


def known() -> dict[str, str]:
    """Return the sections of the page, by script."""
    _, *sections = PAGE.read_text().split("\n## ") if PAGE.exists() else [""]
    return {found[1]: f"## {text.rstrip()}\n" for text in sections if (found := COMMAND.search(text))}


def section(script: Path) -> str:
    """Run a script, and return its section: title and output."""
    text = ast.get_docstring(ast.parse(script.read_text())) or script.stem
    print(f"== {script.name}", flush=True)
    lines = []
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if running.returncode:
        raise SystemExit(f"{script.name} failed")
    command = f"`python benchmarks/{script.name}` ({machine()})"
    return f"## {text.splitlines()[0].rstrip('.')}\n\n{command}\n\n```text\n{''.join(lines)}```\n"


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", nargs="+", default=[], help="scripts, without .py")
    options = arguments.parse_args()
    for script in questions(options.only):
        # Write after each script, because all of them take long.
        answers = {**known(), script.name: section(script)}
        PAGE.write_text("\n".join([HEAD, *(answers[name] for name in sorted(answers) if (HERE / name).exists())]))
    print(f"written: {PAGE.relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
