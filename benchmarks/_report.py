"""Run every benchmark in this folder, and write the results to docs/benchmarks.md.

    python benchmarks/_report.py [--only mpi_against_bare ...]

With `--only`, the other results stay unchanged: each has its own date and machine. `--only` without a name measures
nothing: it lists the programs that have no results yet.
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


def title(script: Path) -> str:
    """Return the heading of a script's section: the first sentence of its docstring."""
    text = ast.get_docstring(ast.parse(script.read_text())) or script.stem
    return f"## {text.splitlines()[0].rstrip('.')}"


def unmeasured(script: Path) -> str:
    """Return the section of a script that has no results yet."""
    return f"{title(script)}\n\n`python benchmarks/{script.name}` has not been run yet on an idle machine.\n"


def section(script: Path) -> str:
    """Run a script, and return its section: title and output."""
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
    return f"{title(script)}\n\n{command}\n\n```text\n{''.join(lines)}```\n"


def write(new: dict[str, str]) -> None:
    """Write the page with new sections, those known, and one for each script without results."""
    answers = {script.name: unmeasured(script) for script in questions([])} | known() | new
    PAGE.write_text("\n".join([HEAD, *(answers[name] for name in sorted(answers) if (HERE / name).exists())]))


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", nargs="*", help="scripts, without .py; none: only list those without results")
    options = arguments.parse_args()
    write({})
    for script in [] if options.only == [] else questions(options.only or []):
        # Write after each script, because all of them take long.
        write({script.name: section(script)})
    print(f"written: {PAGE.relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
