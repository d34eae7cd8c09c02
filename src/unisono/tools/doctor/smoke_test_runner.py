"""Runner of `unisono.tools.doctor.smoke_test`; converts its output to findings."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from unisono.tools.doctor.finding import Finding, ok, problem
from unisono.tools.doctor.subprocesses import CompletedRun, clean_environment, run

__all__ = ["tried"]

# Grace period in which the test reports the cause of its wait, before it is ended.
_LAST_WORDS_S = 4.0


def tried(
    fixes: Mapping[str, str],
    limit_s: float,
    options: Sequence[str] = (),
    before: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> list[Finding]:
    """Return an ok for each backend on which ranks sum correctly, else a problem with the reason.

    Args:
        fixes: Backends in order of testing, each with its fix in case of failure.
        limit_s: Seconds in total.
        options: Options of the test's command line.
        before: Prefix of the command, such as mpiexec and its options.
        environment: Environment of the ranks; if None, that of this process without its launcher's variables.
    """
    # Wall-clock deadline, because Python and torch may take long to start.
    deadline = str(time.time() + limit_s - _LAST_WORDS_S)
    command = [
        *before,
        sys.executable,
        "-m",
        "unisono.tools.doctor.smoke_test",
        *fixes,
        *options,
        "--deadline",
        deadline,
    ]
    ended = run(command, limit_s, clean_environment(OMP_NUM_THREADS="1") if environment is None else environment)
    said = _said(ended)
    return [_judged(backend, said.get(backend, []), ended, fix) for backend, fix in fixes.items()]


def _said(ended: CompletedRun) -> dict[str, list[dict[str, Any]]]:
    """Return each rank's line, by backend; ignore other output in between."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in ended.out.splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if isinstance(said, dict) and "backend" in said:
            found.setdefault(said["backend"], []).append(said)
    return found


def _judged(backend: str, said: Sequence[dict[str, Any]], ended: CompletedRun, fix: str) -> Finding:
    errors = [one["error"] for one in said if "error" in one]
    if errors or not said:
        return problem(f"{backend}: {errors[0] if errors else ended.why}", fix)
    if not all(one["right"] for one in said):
        return problem(f"{backend}: the sum was wrong", fix)
    first = said[0]
    return ok(
        f"{backend}: {first['size']} ranks compute the right sum, about {first['small_s'] * 1e6:.0f} us for 8 B and "
        f"{first['large_s'] * 1e3:.2g} ms for 1 MiB"
    )
