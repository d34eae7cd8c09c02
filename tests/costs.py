"""Pytest plugin that measures what each test costs: wall time, processor time with all descendants, processes.

    make slow [ARGS=tests/unit/gradients]

It prints the sums, the dearest tests, and those of `tests/unit` that take over 2 s without the mark `slow(reason)`;
all tests are in `.cache/test-costs.tsv`. Nothing fails by these figures: they depend on what else the machine does.

Each xdist worker enters a cgroup of its own, which every process that it starts inherits. So ranks, their children
and whatever a forkserver starts are counted. RUSAGE_CHILDREN would leave out half: ranks are no children of the
process that waits for them. The cost of a module's fixture is counted in the first and the last test that use it.

Needs Linux with a cgroup v2 hierarchy in which this user may make groups (root may).
"""

from __future__ import annotations

import _thread
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

TABLE = Path(__file__).parents[1] / ".cache" / "test-costs.tsv"
SHOWN = 40
SLOW_S = 2.0
_ROWS = "UNISONO_TEST_COSTS"
"""Variable by which workers learn the file to which they append."""
_POLL_S = 0.01


class Cost(NamedTuple):
    """What a test took; `reason` is that of its mark `slow`."""

    wall_s: float
    processor_s: float
    processes: int
    test: str
    reason: str = ""

    def row(self) -> str:
        return f"{self.wall_s:.3f}\t{self.processor_s:.3f}\t{self.processes}\t{self.test}\t{self.reason}"


class Group:
    """A cgroup that this process enters, and all that it starts."""

    def __init__(self, parent: Path, name: str) -> None:
        self.parent = parent
        self.path = parent / name
        self.seen: set[str] = set()
        self.path.mkdir()
        (self.path / "cgroup.procs").write_text(str(os.getpid()))
        # A plain thread, which `threading.enumerate` does not list: tests compare that list.
        _thread.start_new_thread(self._watch, ())

    def processor_s(self) -> float:
        usage = (self.path / "cpu.stat").read_text().split()
        return int(usage[usage.index("usage_usec") + 1]) / 1e6

    def close(self) -> None:
        """Leave and remove it; what is still running in it moves to the parent."""
        for process in (self.path / "cgroup.procs").read_text().split():
            (self.parent / "cgroup.procs").write_text(process)
        self.path.rmdir()

    def _watch(self) -> None:
        # Processes that live for less than a poll are missed; they cost next to nothing.
        while True:
            try:
                self.seen.update((self.path / "cgroup.procs").read_text().split())
            except OSError:
                return
            time.sleep(_POLL_S)


class Costs:
    """Measures the tests of this process, and appends a row of each to a file."""

    def __init__(self, group: Group, rows: Path) -> None:
        self.group = group
        self.rows = rows

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        slow = item.get_closest_marker("slow")
        began = time.monotonic()
        processor_s = self.group.processor_s()
        before = len(self.group.seen)
        result = yield
        cost = Cost(
            time.monotonic() - began,
            self.group.processor_s() - processor_s,
            len(self.group.seen) - before,
            item.nodeid,
            "" if slow is None else str(slow.args[0]),
        )
        with self.rows.open("a") as rows:
            print(cost.row(), file=rows)
        return result

    def pytest_unconfigure(self) -> None:
        self.group.close()


class Report:
    """Prints what all processes have measured."""

    def __init__(self, group: Group, rows: Path) -> None:
        self.group = group
        self.rows = rows
        self.started = time.monotonic()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        wall_s = time.monotonic() - self.started
        out = terminalreporter.write_line
        costs = sorted(self._costs(), key=lambda cost: -cost.processor_s)
        TABLE.write_text("".join(f"{cost.row()}\n" for cost in costs))
        folders: dict[str, list[Cost]] = {}
        for cost in costs:
            folders.setdefault(str(Path(cost.test.partition("::")[0]).parent), []).append(cost)
        terminalreporter.section("costs: wall s, processor s, processes")
        for folder, those in sorted(folders.items(), key=lambda each: -sum(cost.processor_s for cost in each[1])):
            out(_sum(folder, those).row())
        out("")
        for cost in costs[:SHOWN]:
            out(cost.row())
        out("")
        for cost in costs:
            if cost.wall_s > SLOW_S and cost.test.startswith("tests/unit/") and not cost.reason:
                out(f"{cost.wall_s:.1f} s, and no mark says why: {cost.test}")
        tests_s = sum(cost.processor_s for cost in costs)
        out(
            f"{wall_s:.0f} s of wall time; {self.group.processor_s():.0f} s of processor time, {tests_s:.0f} s in tests"
        )
        out(f"the rest is start-up, collection and reports; each test is in {TABLE}")

    def _costs(self) -> list[Cost]:
        rows = [line.split("\t") for line in self.rows.read_text().splitlines()]
        self.rows.unlink()
        return [Cost(float(row[0]), float(row[1]), int(row[2]), *row[3:]) for row in rows]


def _sum(name: str, costs: list[Cost]) -> Cost:
    return Cost(
        sum(cost.wall_s for cost in costs),
        sum(cost.processor_s for cost in costs),
        sum(cost.processes for cost in costs),
        f"{name} ({len(costs)} tests)",
    )


def pytest_configure(config: pytest.Config) -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    try:
        group = Group(_current_group(), worker or f"unisono-tests-{os.getpid()}")
    except OSError as error:
        raise pytest.UsageError(f"measuring needs a cgroup v2 in which groups can be made: {error}") from error
    if worker is None:
        TABLE.parent.mkdir(exist_ok=True)
        os.environ[_ROWS] = str(TABLE.with_suffix(f".{os.getpid()}"))
        Path(os.environ[_ROWS]).touch()
        config.pluginmanager.register(Report(group, Path(os.environ[_ROWS])), "report-of-costs")
    # A process that hands out all tests runs none.
    config.pluginmanager.register(Costs(group, Path(os.environ[_ROWS])), "costs-of-tests")


def _current_group() -> Path:
    """Folder of the cgroup v2 that this process is in."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    roots = [fields[1] for fields in mounts if fields[2] == "cgroup2"]
    if not roots:
        raise OSError("none is mounted")
    groups = Path("/proc/self/cgroup").read_text().splitlines()
    inside = next(line.removeprefix("0::") for line in groups if line.startswith("0::"))
    return Path(roots[0]) / inside.lstrip("/")
