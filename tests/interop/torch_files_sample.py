"""Tests of process groups that come with torch, as a file of tests of torch's: see `torch_files.py`.

Of the environment, torch takes the number of ranks (WORLD_SIZE) and the backend whose tests are wanted (BACKEND).
"""

from __future__ import annotations

from torch.testing._internal.distributed import distributed_test


class TestSample(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """Each test on ranks of its own."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()
