"""Run every benchmark in this folder, write its output to docs/benchmarks/, and make docs/benchmarks.md of all outputs.

    python benchmarks/_report.py [--only mpi_against_bare ...]

With `--only`, the other results stay unchanged: each has its own date and machine. `--only` without a name measures
nothing: it makes the page and its pictures of the outputs that are there.
The machine should be otherwise idle.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import _chart
import _page
from _questions import parser
from _raw import Raw

from unisono.tools import bench


def machine() -> str:
    """Return the date and the machine of the measurement."""
    system = f"{platform.system()} {platform.release().split('-')[0]}"
    here = bench.machine()
    python = f"Python {here['python']}, torch {here['torch']}"
    return f"{datetime.now(UTC).date()}, {here['processors']} cores ({here['processor']}), {system}, {python}"


def measured(script: Path) -> Raw:
    """Run a script, show its output, and return it."""
    print(f"== {script.name}", flush=True)
    lines = []
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if running.returncode:
        raise SystemExit(f"{script.name} failed")
    return Raw(f"python benchmarks/{script.name}", machine(), "".join(lines))


def write() -> None:
    """Write the page and its pictures."""
    _page.write()
    _chart.PATH.write_text(_chart.chart())
    _chart.SPEED.write_text(_chart.speed())


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", nargs="*", help="scripts, without .py; none: only make the page")
    only = arguments.parse_args().only
    write()
    for script in _page.scripts():
        if only is None or script.stem in only:
            measured(script).write(script.stem)
            # Write after each script, because all of them take long.
            write()
    print(f"written: {_page.PATH.relative_to(_page.HERE.parent)}")


if __name__ == "__main__":
    main()
