"""The page docs/benchmarks.md: a picture, a table for each question, and links to the output of every program."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import _tables
from _raw import Raw

HERE = Path(__file__).parent
PATH = HERE.parent / "docs" / "benchmarks.md"
HEAD = """\
# Benchmarks

{method}

![Time of training steps relative to DDP, and of all_reduce relative to gloo](pictures/speed.svg)

## What to expect

{expected}

unisono is faster if the ratio is below 1. Ratios carry over to other machines better than times.

![Time of all_reduce relative to gloo, by message size](pictures/benchmarks.svg)

The picture shows medians, with quartiles as thin vertical lines, for unregistered memory and warm caches.
"""
METHOD = (
    "`make bench` made these measurements{where}. The compared implementations alternate within a run. Each ratio is"
    " the median over pairs of adjacent samples, with quartiles in brackets. All results were verified. A program can"
    " take several times as long while the host runs the virtual machine's two processors on distant cores. Bounds are"
    " our own limits for noticing slowdowns; the raw output says which were met."
)


@dataclass(frozen=True)
class Question:
    """A heading, the program that answers it, what is measured, and the function that makes the table."""

    heading: str
    program: str
    measured: str
    table: Callable[[str], str]


QUESTIONS = (
    Question(
        "Network: tcp and gloo",
        "network",
        "Time of an all_reduce on backend tcp, and its ratio to torch's gloo and to Open MPI over TCP, on one"
        " host's loopback device.",
        _tables.sweep,
    ),
    Question(
        "Shared memory: shm and gloo",
        "shm_against_gloo",
        "Time of an all_reduce on backend shm, and its ratio to torch's gloo, on one host. The raw output also covers"
        " other collectives, 8 ranks, registered memory and cold caches.",
        _tables.sweep,
    ),
    Question(
        "Training steps on one host",
        "averager_against_ddp",
        "Time of a training step alone (without averaging), with torch's DDP on gloo, and with a GradientAverager on"
        " shared memory. Exposed time is the time that averaging adds to the step; processor time is the CPU time that"
        " averaging adds.",
        _tables.steps,
    ),
    Question(
        "Two hosts",
        "two_hosts",
        "Time of an all_reduce on backend shm+tcp relative to torch's gloo, between two network namespaces with 2"
        " ranks each. Links are free (not limited), near (1 Gbit/s) or far (100 Mbit/s, 2 ms each way).",
        _tables.links,
    ),
    Question(
        "Remote calls: unisono and torch",
        "rpc_against_torch",
        "Time of an empty remote call, and of a call with 1 MiB, using `un.rpc` and torch's `rpc_sync` (TensorPipe),"
        " between two processes on one host.",
        _tables.calls,
    ),
    Question(
        "Checkpoints",
        "checkpoint_speed",
        "Time to save and to load a model's state, on one disk, with unisono, torch.save and fsync,"
        " torch.distributed.checkpoint (DCP), and raw writes. Before cold loads, the files were dropped from the page"
        " cache.",
        _tables.saves,
    ),
    Question(
        "Cost of checks",
        "checking_cost",
        'Time that `check="auto"` and `check="full"` add to an all_reduce between 2 ranks, in microseconds and as a'
        " fraction of the time without checks.",
        _tables.checks,
    ),
)


def scripts() -> list[Path]:
    """Return all programs in order."""
    return sorted(path for path in HERE.glob("*.py") if not path.name.startswith("_"))


def page() -> str:
    """Return the page made of the files of raw output."""
    known = {script.stem: Raw.read(script.stem) for script in scripts()}
    asked = [raw for question in QUESTIONS if (raw := known[question.program])]
    machines = dict.fromkeys(raw.machine for raw in asked)
    dates = sorted({raw.date for raw in asked})
    where = f" from {dates[0]} to {dates[-1]} on {'; '.join(machines)}" if asked else ""
    outputs = {name: raw.output for name, raw in known.items() if raw}
    shown = {question.program for question in QUESTIONS}
    others = [entry(script, known[script.stem]) for script in scripts() if script.stem not in shown]
    return "\n".join(
        [
            HEAD.format(method=filled(METHOD.format(where=where)), expected=_tables.expected(outputs)),
            *(section(question, known[question.program]) for question in QUESTIONS),
            "## Raw output of other programs\n",
            *others,
            "",
        ]
    )


def section(question: Question, raw: Raw | None) -> str:
    """Return the section of a question: its table, the conditions of the run, and links."""
    name = question.program
    head = f"## {question.heading}\n\n{filled(question.measured)}\n"
    command = raw.command if raw else f"python benchmarks/{name}.py"
    program = f"[`{command}`](../benchmarks/{name}.py)"
    if raw is None:
        return f"{head}\n{program} has not been run yet on an idle machine.\n"
    run = filled(f"{program}, {ended(raw)}. [Raw output](benchmarks/{name}.txt).")
    table = question.table(raw.output) or last_lines(raw.output)
    wrong = [f"**{line[2:]}**\n\n" for line in raw.output.splitlines() if re.match("# wrong elements: (?!none)", line)]
    return f"{head}\n{table}\n\n{''.join(wrong)}{run}\n"


def filled(text: str) -> str:
    """Return a paragraph in lines of at most 120 characters."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def last_lines(output: str) -> str:
    """Return the end of an output without a known table."""
    return "\n".join(["```text", *output.splitlines()[-8:], "```"])


def entry(script: Path, raw: Raw | None) -> str:
    """Return the line of a program in the list: the first line of its docstring, and a link to its output."""
    title = (ast.get_docstring(ast.parse(script.read_text())) or script.stem).splitlines()[0].rstrip(".:")
    if raw is None:
        return f"- {title}: `{script.name}`, not run yet."
    return f"- [{title}](benchmarks/{script.stem}.txt): `{script.name}`, {ended(raw)}."


def ended(raw: Raw) -> str:
    """Return the date of a run, and how many of its bounds were not met."""
    missed = sum("MISSED" in line for line in raw.output.splitlines())
    return raw.date + (f" ({missed} bound{'s' if missed > 1 else ''} not met)" if missed else "")


def write() -> None:
    PATH.write_text(page())
