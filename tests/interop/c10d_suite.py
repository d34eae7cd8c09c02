"""Torch's own tests of process groups on one backend: `python c10d_suite.py BACKEND TRANSPORT OUTCOMES.json`.

Of the environment, torch takes the number of ranks (WORLD_SIZE) and the backend whose tests are wanted (BACKEND).
Written for each test: "passed", "skipped", or the text of its failure.
"""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import re
import sys
import unittest
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal.distributed import distributed_test as c10d

from unisono.interop import GroupOptions


class Suite(c10d.TestDistBackend, c10d.DistributedTest._DistTestBase):
    """Each test on ranks of its own, which are forked: torch's way, to spawn them, takes seconds a rank."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(multiprocessing.get_context("fork").Process)

    def _check_return_codes(self, fn: Any, elapsed_time: float) -> None:
        super()._check_return_codes(fn, elapsed_time)
        # Torch looks at the first one.
        codes = {process.exitcode for process in self.processes}
        assert len(codes) == 1 or fn in self.skip_return_code_checks, f"ranks ended with {codes}"


def outcome(name: str) -> str:
    result = unittest.TestResult()
    Suite(name).run(result)
    for _, text in (*result.failures, *result.errors):
        return text
    return "skipped" if result.skipped else "passed"


def main(backend: str, transport: str, outcomes: str) -> None:
    torch.set_num_threads(1)
    # Torch's tests pass no options.
    GroupOptions.__init__.__defaults__ = (transport, *(GroupOptions.__init__.__defaults__ or ())[1:])
    # Torch has chosen the tests, at import, by the name of a backend that it knows; the groups are of this one.
    c10d.BACKEND = backend
    # For this name alone, tests of a part of the ranks run on fewer than eight.
    os.environ["BACKEND"] = "mpi"
    tests = {name: getattr(Suite, name) for name in unittest.TestLoader().getTestCaseNames(Suite)}
    for test in tests.values():
        # No other backend of the CPU had these once.
        if getattr(test, "__unittest_skip_why__", "").startswith("Only MPI supports"):
            test.__unittest_skip__ = False
    # Ranks would be started to find that there is no GPU.
    names = [name for name, test in tests.items() if not re.search("@skip_if_(lt_x|no)_gpu", inspect.getsource(test))]
    Path(outcomes).write_text(json.dumps({name: outcome(name) for name in names}))


if __name__ == "__main__":
    main(*sys.argv[1:])
