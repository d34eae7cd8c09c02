"""Torch's own test files on a backend and on gloo: `python torch_files.py FOLDER PATTERN... [--backend unisono]`.

FOLDER holds the files of torch's `test/distributed`, as in its source package; a PATTERN is a path below it, or a glob.
The files are copied with the CPU in place of CUDA, and make groups of the backend where they ask for gloo, NCCL or the
default; those of one folder share a process. Some take the backend from the environment: set BACKEND to gloo.
Printed: for each file, how many tests pass; then each test that passes on gloo only, with its error. If there
is one, the exit status is 1.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from functools import partialmethod
from pathlib import Path
from typing import Any

__all__ = ["Outcomes", "compared", "on_cpu", "patch", "table"]

Outcomes = dict[str, tuple[str, str]]
"""For each test, by its file and name: its outcomes on gloo and on the backend. "passed", "skipped", or an error."""

CPU = {
    r"@unittest\.skipIf\(\s*not (TEST_CUDA|TEST_MULTIGPU|torch\.cuda\.is_available\(\)),\s*\"[^\"]*\",?\s*\)": "",
    r"\.cuda\([^()]*\)": ".cpu()",
    r"torch\.cuda\.current_device\(\)": 'torch.device("cpu")',
    r"torch\.cuda\.device_count\(\)": "2",
    r"f?([\"'])cuda(:\d+|:\{[^{}]*\})?\1": r"\1cpu\1",
    r"torch\.device\(([\"'])cpu\1, [^()]*\)": r"torch.device(\1cpu\1)",
    r"torch\.cuda\.(set_device|synchronize|empty_cache|manual_seed|_sleep)\([^()]*\)": "None",
    r"device_ids=\[[^\]]*\]": "device_ids=None",
    r"\.to\((self\.)?(rank|device_id)\)": ".cpu()",
    r"(rank:[^/\"']*)/cuda:[^\"']*": r"\1/cpu",
    r"device=(self\.)?rank\b": 'device="cpu"',
}
FUTURE = r"^from __future__ import .*\n"
FIRST = "import sys; sys.path.insert(0, {here!r}); import torch_files; torch_files.patch({backend!r})\n"
REPLACED = (None, "gloo", "nccl", "cpu:gloo", "cpu:gloo,cuda:nccl")


def patch(backend: str) -> None:
    """Make groups of a backend in this process, whichever of `REPLACED` a test names, and fork its ranks."""
    # Each rank would import the compiler and our group for itself.
    import torch._dynamo  # noqa: F401
    import torch.distributed as dist
    from torch.testing._internal import common_distributed

    import unisono.interop.group  # noqa: F401

    on_cpu_ranks()
    # A rank that is spawned imports torch anew, which takes seconds.
    fork = multiprocessing.get_context("fork").Process
    common_distributed.MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(fork)  # type: ignore[attr-defined, method-assign]

    def replaced(original: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **options: Any) -> Any:
            # `init_process_group` takes the backend first; `new_group` takes that of the default group if it has none.
            if original.__name__ == "init_process_group" and args:
                options["backend"], *args = args  # type: ignore[assignment]
            if options.get("backend") in REPLACED:
                options["backend"] = backend
            return original(*args, **options)

        return made

    for name in ("init_process_group", "new_group"):
        made = replaced(getattr(dist, name))
        setattr(dist, name, made)
        setattr(dist.distributed_c10d, name, made)


def on_cpu_ranks() -> None:
    """Let torch's tools for tests of CUDA run the tests on the CPU."""
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.testing._internal import common_distributed, common_fsdp
    from torch.testing._internal.distributed._tensor import common_dtensor

    def unconditional(*_: object, **__: object) -> Callable[[Any], Any]:
        return lambda test: test

    # Pytest would take one of the names for a test.
    unconditional.__test__ = False  # type: ignore[attr-defined]
    tools: Any = common_distributed
    for name in ("skip_if_lt_x_gpu", "requires_nccl", "requires_nccl_version", "requires_accelerator_dist_backend"):
        setattr(tools, name, unconditional)
    common_dtensor.skip_unless_torch_gpu = lambda method: method
    # Names that torch has changed: of a class, and of a decorator that runs each test compiled, too.
    tools.MultiProcContinousTest = getattr(tools, "MultiProcContinuousTest", None)
    common_fsdp.test_compiled_fsdp = unconditional  # type: ignore[attr-defined]
    # FSDP's tests need as many accelerators as ranks.
    torch.accelerator.device_count = lambda: 4
    common_fsdp.DEVICE_COUNT = 2
    common_fsdp.FSDPTestContinuous.world_size = 2
    wrapped: Any = FullyShardedDataParallel
    wrapped.__init__ = partialmethod(wrapped.__init__, device_id=torch.device("cpu"))


def on_cpu(text: str, backend: str) -> str:
    """Return a file of tests for the CPU, whose groups are of a backend."""
    for pattern, replacement in CPU.items():
        text = re.sub(pattern, replacement, text)
    # Nothing may stand before imports of the future.
    future = "".join(re.findall(FUTURE, text, re.MULTILINE))
    rest = re.sub(FUTURE, "", text, flags=re.MULTILINE)
    return future + FIRST.format(here=str(Path(__file__).parent), backend=backend) + rest


def started(
    files: Sequence[Path], folder: Path, backend: str, limit_s: int, chosen: str
) -> tuple[subprocess.Popen[bytes], Path]:
    """Start the tests of the files of one folder; return also where their outcomes will be."""
    target = folder / f"on_{backend}"
    target.mkdir()
    # They may import others of their folder.
    for file in files[0].parent.glob("[!_]*.py"):
        (target / file.name).write_text(on_cpu(file.read_text(), backend))
    written = target / "outcomes.xml"
    words = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={target}", f"--junitxml={written}"]
    words += [f"--timeout={limit_s}", "--continue-on-collection-errors", "-k", chosen, *(file.name for file in files)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    with (target / "tests.log").open("w") as log:
        command = [sys.executable, "-m", "pytest", *words]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=target), written


def outcomes(path: Path) -> dict[str, str]:
    """Return the outcome of each test by its file and name, of an error the last line; nothing if pytest wrote none."""
    found = {}
    for case in ET.parse(path).iter("testcase") if path.exists() else ():
        file, *names = (case.get("classname") or "").split(".")[-2:]
        name = f"{file}::{'.'.join([*names, case.get('name') or ''])}"
        bad = next((part for part in case if part.tag in ("failure", "error")), None)
        if bad is None:
            found[name] = "passed" if case.find("skipped") is None else "skipped"
        else:
            errors = re.findall(r"^(?:\w+\.)*\w*(?:Error|Exception): .*", bad.text or "", re.MULTILINE)
            found[name] = (errors or [bad.get("message") or "failed"])[-1]
    return found


def compared(files: Sequence[Path], backend: str = "unisono", limit_s: int = 120, chosen: str = "") -> Outcomes:
    """Run files of tests, those of a folder on both backends at the same time.

    Args:
        files: Files of torch's, or written like them.
        backend: Name of the backend beside gloo.
        limit_s: Seconds for one test; one that takes more fails.
        chosen: Expression of pytest's `-k`.
    """
    found: Outcomes = {}
    for parent in dict.fromkeys(file.parent for file in files):
        with tempfile.TemporaryDirectory() as folder:
            of_parent = [file for file in files if file.parent == parent]
            runs = [started(of_parent, Path(folder), name, limit_s, chosen) for name in ("gloo", backend)]
            for process, _ in runs:
                process.wait()
            gloo, here = (outcomes(path) for _, path in runs)
            found |= {name: (text, here.get(name, "did not run")) for name, text in gloo.items()}
    return found


def gloo_only(found: Outcomes) -> dict[str, str]:
    """Return the errors of the tests that pass on gloo only."""
    return {name: here for name, (gloo, here) in found.items() if gloo == "passed" != here}


def table(found: Outcomes, backend: str = "unisono") -> str:
    """Return the numbers of tests that pass, by file, and the tests that pass on gloo only."""
    lines = [f"{'file':44} {'tests':>6} {'gloo':>6} {backend:>8} {'gloo only':>10}"]
    for file in dict.fromkeys(name.partition("::")[0] for name in found):
        rows = {name: pair for name, pair in found.items() if name.startswith(f"{file}::")}
        gloo, here = (sum(pair[i] == "passed" for pair in rows.values()) for i in (0, 1))
        lines.append(f"{file:44} {len(rows):6} {gloo:6} {here:8} {len(gloo_only(rows)):10}")
    return "\n".join([*lines, *(f"{name}: {text[:300]}" for name, text in gloo_only(found).items())])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("patterns", nargs="+", help="paths or globs below the folder")
    parser.add_argument("--backend", default="unisono")
    parser.add_argument("--limit", type=int, default=120, help="seconds for one test")
    parser.add_argument("-k", default="", help="tests to run, as for pytest")
    given = parser.parse_args()
    files = sorted({path for pattern in given.patterns for path in given.folder.glob(pattern)})
    if not files:
        parser.error(f"no files in {given.folder} match {given.patterns}")
    found = compared(files, given.backend, given.limit, given.k)
    print(table(found, given.backend))
    return 1 if gloo_only(found) or not found else 0


if __name__ == "__main__":
    sys.exit(main())
