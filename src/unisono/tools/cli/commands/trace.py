"""Summarize trace files: exposed communication, overlap, and the rank that all others wait for.

A trace file is a file that un.trace wrote.

  unisono trace summary run.json
  unisono trace merge run.json run.rank0.json run.rank1.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from unisono.diagnostics.trace_file import check_trace, merged
from unisono.diagnostics.trace_summary import format_summary, summarize
from unisono.tools.cli import UsageError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the two actions: summarize one file, and merge several files into one."""
    actions = parser.add_subparsers(title="actions", dest="action", metavar="<action>", required=True)
    summary = actions.add_parser("summary", help="print exposed communication, overlap, skew and the last ranks")
    summary.add_argument("file", type=Path, help="file of un.trace")
    summary.add_argument("--json", action="store_true", help="print the figures as JSON, with times in seconds")
    merge = actions.add_parser("merge", help="join the parts that ranks wrote by themselves because one failed")
    merge.add_argument("--json", action="store_true", help="print the file's name and number of events as JSON")
    merge.add_argument("output", type=Path, help="file to write; it must not exist")
    merge.add_argument("parts", type=Path, nargs="+", help="files to join, such as run.rank0.json")


def run(given: argparse.Namespace) -> int:
    """Print a summary, or write the merged file."""
    if given.action == "merge":
        return _merge(given)
    try:
        found = summarize(_read(given.file))
    except ValueError as error:
        raise UsageError(f"{given.file}: {error}") from error
    print(json.dumps(found, indent=2) if given.json else format_summary(found))
    return 0


def _merge(given: argparse.Namespace) -> int:
    documents = [_read(path) for path in given.parts]
    _check_same_run(given.parts, documents)
    uncertainty = max(one.get("otherData", {}).get("clock_uncertainty_us", 0.0) for one in documents)
    other = {**documents[0].get("otherData", {}), "clock_uncertainty_us": uncertainty}
    document = merged([one["traceEvents"] for one in documents], other)
    try:
        with given.output.open("x") as file:
            json.dump(document, file)
    except OSError as error:
        raise UsageError(f"{given.output} cannot be written: {error.strerror}") from error
    events = len(document["traceEvents"])
    print(json.dumps({"written": str(given.output), "events": events}) if given.json else f"written: {given.output}")
    return 0


def _check_same_run(paths: list[Path], documents: list[Any]) -> None:
    """Raise `UsageError` unless the documents are from the same run of un.trace and contain different ranks."""
    holder: dict[int, Path] = {}
    for path, document in zip(paths, documents, strict=True):
        if document.get("otherData", {}).get("run") != documents[0].get("otherData", {}).get("run"):
            raise UsageError(f"{path} and {paths[0]} are of different runs of unisono.trace; pass parts of one run")
        for rank in {event["pid"] for event in document["traceEvents"] if event["ph"] == "X" and "pid" in event}:
            if rank in holder:
                raise UsageError(f"{path} and {holder[rank]} both hold rank {rank}; pass one file of each rank")
            holder[rank] = path


def _read(path: Path) -> Any:
    """Return the trace in a file. Raises `UsageError` if the file is not a trace."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        check_trace(document)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON ({error}); pass a file of unisono.trace") from error
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error
    return document
