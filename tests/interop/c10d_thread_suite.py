"""Torch's own tests of process groups on ranks that are threads: `c10d_thread_suite.py BACKEND OUTCOMES.json`.

Of the environment, torch takes the number of ranks (WORLD_SIZE) and the backend whose tests are wanted (BACKEND).
Written for each test: "passed", "skipped", or the text of its failure.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
import threading
import unittest
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.testing._internal.common_utils import TestCase, set_rng_seed
from torch.testing._internal.distributed import distributed_test as c10d

import unisono as un

SIZE = int(os.environ["WORLD_SIZE"])
LIMIT_S = 30.0


class ThreadSuite(c10d.DistributedTest._DistTestBase, TestCase):
    """Tests of torch, as one rank runs them. Torch's own barrier counts processes."""

    meetings: ClassVar[dict[tuple[str, int], threading.Barrier]] = {}
    world_size = str(SIZE)
    rank: int
    file_name: str

    @property
    def init_method(self) -> str:
        return f"file://{self.file_name}"

    def _barrier(self, wait_for: int | None = None, timeout: float = LIMIT_S) -> None:
        count = wait_for or SIZE
        self.meetings.setdefault((self._testMethodName, count), threading.Barrier(count)).wait(timeout)

    def call_dist_op(
        self,
        event: str,
        is_async: bool,
        op: Any,
        *args: Any,
        expect_event: bool = True,
        secondary_op_call: Any = None,
        tensor_shapes: Any = None,
        **kwargs: Any,
    ) -> None:
        """Make one or two calls, without torch's profiler, which is one for a process."""
        works = [op(*args, **kwargs)]
        if secondary_op_call is not None:
            works.append(secondary_op_call())
        for work in works if is_async else []:
            work.wait()


def on_rank(name: str, backend: str) -> None:
    case = ThreadSuite(name)
    case.rank = dist.get_rank()
    case.file_name = "unused"
    limit = timedelta(seconds=c10d.CUSTOM_PG_TIMEOUT.get(name, LIMIT_S))
    dist.init_process_group(
        backend=c10d.BACKEND, init_method=case.init_method, world_size=SIZE, rank=case.rank, timeout=limit
    )
    case._barrier()
    set_rng_seed()
    getattr(case, name)()
    case._barrier()


def outcome(name: str, backend: str) -> str:
    test: Any = getattr(ThreadSuite, name)
    if getattr(test, "__unittest_skip__", False):
        return "skipped"
    # Torch's tests set the debug level of the process, and the ranks' threads race for the last one.
    os.environ.pop("TORCH_DISTRIBUTED_DEBUG", None)
    dist.set_debug_level_from_env()
    try:
        un.testing.torch_ranks(SIZE, backend, timeout=LIMIT_S, limit_s=2 * LIMIT_S).run(partial(on_rank, name, backend))
    except unittest.SkipTest:
        return "skipped"
    except BaseException as error:
        # Torch ends a process to say that it has skipped a test.
        skips = [skip.exit_code for skip in c10d.TEST_SKIPS.values()]
        ended = re.search(r"SystemExit\((\d+)\)", str(error))
        return "skipped" if ended and int(ended[1]) in skips else f"{type(error).__name__}: {error}"
    return "passed"


def main(backend: str, outcomes: str) -> None:
    torch.set_num_threads(1)
    # For this name alone, tests of a part of the ranks run on fewer than eight.
    os.environ["BACKEND"] = "mpi"
    c10d.initialize_temp_directories()
    tests = {name: getattr(ThreadSuite, name) for name in unittest.TestLoader().getTestCaseNames(ThreadSuite)}
    for test in tests.values():
        # No other backend of the CPU had these once.
        if getattr(test, "__unittest_skip_why__", "").startswith("Only MPI supports"):
            test.__unittest_skip__ = False
    names = [name for name, test in tests.items() if not re.search("@skip_if_(lt_x|no)_gpu", inspect.getsource(test))]
    Path(outcomes).write_text(json.dumps({name: outcome(name, backend) for name in names}))


if __name__ == "__main__":
    main(*sys.argv[1:])
