"""Inspect a checkpoint, verify every byte of it, compare two checkpoints, or convert to or from other formats.

PATH is the directory or URL of one checkpoint; `convert` also reads single files.

  unisono checkpoint show runs/7
  unisono checkpoint verify runs/7
  unisono checkpoint diff runs/7 runs/8 --json
  unisono checkpoint convert runs/7 model.safetensors
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import unisono as un
from unisono.core.work import format_bytes
from unisono.errors import CommError
from unisono.tools.cli import UsageError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions and their arguments."""
    actions = parser.add_subparsers(title="actions", dest="action", metavar="show|verify|diff|convert", required=True)
    show = actions.add_parser("show", help="list the tensors of a checkpoint")
    show.add_argument("path", metavar="PATH")
    verify = actions.add_parser(
        "verify", help="compare every byte with its digest; exit with 1 if the checkpoint is damaged"
    )
    verify.add_argument("path", metavar="PATH")
    diff = actions.add_parser("diff", help="print the differences of two checkpoints; exit with 1 if there are any")
    diff.add_argument("path", metavar="PATH")
    diff.add_argument("other", metavar="OTHER")
    other = actions.add_parser("convert", help="read any known format, and write another")
    other.add_argument("path", metavar="PATH")
    other.add_argument("target", metavar="TARGET", type=Path)
    other.add_argument(
        "--to",
        metavar="FORMAT",
        help="unisono, torch, safetensors or dcp: format to write, if TARGET's name does not imply it",
    )
    other.add_argument("--trusted", action="store_true", help="allow pickles in PATH to run code")
    for action in (show, verify, diff, other):
        action.add_argument("--json", action="store_true", help="print the result as JSON")


def run(given: argparse.Namespace) -> int:
    """Run the action. Return 1 if checkpoints differ or a checkpoint is damaged."""
    try:
        return _ACTIONS[given.action](given)
    except un.checkpoint.NoCheckpointError as error:
        within = un.checkpoint.latest(error.path) if error.path else None
        raise UsageError(f"{error}; pass one in it, such as {within}" if within else str(error)) from error


def _show(given: argparse.Namespace) -> int:
    with un.checkpoint.open_archive(given.path) as archive:
        manifest = archive.manifest
        if given.json:
            print(json.dumps(_described(manifest), indent=2))
            return 0
        for name, entry in manifest.tensors.items():
            kind = str(entry.dtype).removeprefix("torch.")
            print(f"{name:48} {kind:10} {'x'.join(map(str, entry.shape)) or '()':20} {format_bytes(entry.nbytes):>10}")
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(manifest.created_ns / 1e9))
        extra = ", ".join(f"{key} {value}" for key, value in manifest.extra.items())
        print(
            f"{len(manifest.tensors)} tensors, {format_bytes(manifest.nbytes)} in {len(manifest.files)} files, "
            f"saved by {manifest.ranks} ranks on {when} UTC ({extra})"
        )
    return 0


def _described(manifest: un.checkpoint.Manifest) -> dict[str, Any]:
    """Return what `show --json` prints, as JSON-serializable values."""
    tensors = {
        name: {"dtype": str(one.dtype).removeprefix("torch."), "shape": list(one.shape), "nbytes": one.nbytes}
        for name, one in manifest.tensors.items()
    }
    return {
        "tensors": tensors,
        "nbytes": manifest.nbytes,
        "files": len(manifest.files),
        "ranks": manifest.ranks,
        "extra": manifest.extra,
    }


def _verify(given: argparse.Namespace) -> int:
    with _bar("verifying") as progress:
        manifest = un.checkpoint.verify(given.path, progress=progress)
    if given.json:
        print(json.dumps({"tensors": len(manifest.tensors), "nbytes": manifest.nbytes}))
        return 0
    print(f"{given.path} is whole: {len(manifest.tensors)} tensors, {format_bytes(manifest.nbytes)}")
    return 0


def _diff(given: argparse.Namespace) -> int:
    from unisono.checkpoint.conversion import differences

    with un.checkpoint.open_archive(given.path) as first, un.checkpoint.open_archive(given.other) as second:
        found = differences(first, second)
    print(json.dumps(found, indent=2) if given.json else "\n".join(found) or "they hold the same")
    return 1 if found else 0


def _convert(given: argparse.Namespace) -> int:
    from unisono.checkpoint.formats import FORMATS

    if given.target.exists():
        raise UsageError(f"{given.target} exists already; pass another name")
    if given.to is not None and given.to not in FORMATS:
        raise UsageError(f"unknown format {given.to!r}; known: {', '.join(FORMATS.names())}")
    try:
        un.checkpoint.convert(given.path, given.target, to=given.to, trusted=given.trusted)
    except CommError:
        raise
    # Catch all errors: for damaged files, readers of other formats raise many kinds, some with several paragraphs of
    # text.
    except Exception as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise un.checkpoint.FormatError(
            f"{given.path} cannot be converted: {type(error).__name__}: {reason}"
        ) from error
    print(json.dumps({"written": str(given.target)}) if given.json else f"written: {given.target}")
    return 0


_ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "show": _show,
    "verify": _verify,
    "diff": _diff,
    "convert": _convert,
}


@contextlib.contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """Yield a callback that updates a progress bar, or None if there is no terminal or rich is not installed."""
    if not sys.stdout.isatty():
        yield None
        return
    try:
        from rich.progress import Progress
    except ImportError:
        yield None
        return
    with Progress() as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
