"""Rerun a single rank of a recorded script: its peers' messages are read from a folder that un.record wrote.

The script runs in this process, so that you can attach any debugger; breakpoint() in the script works. The first call
that differs from the recording raises an error that names the call.

  unisono replay runs/7 --rank 3 train.py --epochs 3
  python -m pdb -m unisono replay runs/7 --rank 3 train.py --epochs 3
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from unisono.tools.cli import UsageError, refusing

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: the folder, the rank, the script and the script's arguments."""
    add = parser.add_argument
    add("folder", type=Path, help="folder of un.record")
    add("--rank", type=int, required=True, help="the rank to run, as numbered in the whole job")
    add("-m", "--module", action="store_true", help="the script is a module, as in python -m")
    add("--json", action="store_true", help="print what was found as JSON, after what the script prints")
    add("script", help="a file, or a module with -m")
    add("arguments", nargs=argparse.REMAINDER, default=[], help="arguments of the script").required = False


def run(given: argparse.Namespace) -> int:
    """Run the script, and print whether it matched the recording."""
    if not given.module and not Path(given.script).exists():
        raise UsageError(f"there is no file {given.script!r}; pass -m to run a module")
    from unisono.diagnostics.tracebacks import format_error
    from unisono.errors import MismatchError
    from unisono.launcher.api import OVERRIDE
    from unisono.launcher.script_rank import run_as_main
    from unisono.recording.replayer import RankReplay, without_torch_groups

    with refusing(ValueError, OSError):
        replay = RankReplay(given.folder, given.rank)
    os.environ.update(replay.header["environment"])
    token = OVERRIDE.set(replay)
    status: Any = 0
    try:
        with without_torch_groups():
            run_as_main([*(["-m"] if given.module else []), given.script, *given.arguments])
    except SystemExit as leaving:
        status = leaving.code or 0
    except MismatchError as error:
        if replay.difference is None:
            raise
        print(format_error(error), end="", file=sys.stderr)
    finally:
        OVERRIDE.reset(token)
    _show(replay.report(), as_json=given.json)
    same = replay.begun and replay.difference is None
    return status if same and isinstance(status, int) else 1


def _show(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found, indent=2))
        return
    did = f"rank {found['rank']}: {found['calls']} collectives and {found['messages']} messages as recorded"
    if found["difference"]:
        print(f"{did}; then {found['difference']}")
    elif not found["begun"]:
        print(f"rank {found['rank']}: the script has not called un.record, where its recording began")
    else:
        print(f"{did}; {'the recording ends here' if found['end_of_recording'] else 'the script has ended'}")
