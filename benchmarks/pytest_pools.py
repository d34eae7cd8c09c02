"""Time of 300 tests under pytest, on process ranks that serve one test after another.

Results (2 cores) are in docs/benchmarks.md. To measure on your machine:

    python benchmarks/pytest_pools.py [--tests 300] [--backends thread,shm,gloo] [--ranks 2,3]

Each test has a collective of its own size and checks the result. Half of the time limit is left for a slow machine.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _questions import parser

MOST_S = 60.0
TESTS = """
import pytest
import torch


@pytest.mark.parametrize("count", range({count}))
@pytest.mark.ranks(2)
def test_sum(comm, count):
    tensor = torch.full((count,), comm.rank + 1)
    comm.all_reduce(tensor)
    assert tensor.tolist() == [comm.size * (comm.size + 1) // 2] * count
"""


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--tests", type=int, default=300, help="number of tests (%(default)s)")
    made.add_argument("--backends", default="thread,shm,gloo", help="backends that share the tests (%(default)s)")
    made.add_argument("--ranks", default="2,3", help="numbers of ranks that share the tests (%(default)s)")
    options = made.parse_args()
    variants = len(options.backends.split(",")) * len(options.ranks.split(","))
    count = -(-options.tests // variants)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_sums.py").write_text(TESTS.format(count=count))
        command = [sys.executable, "-m", "pytest", "-q", "--rootdir", folder, "-p", "no:cacheprovider", folder]
        command += ["--backends", options.backends, "--ranks", options.ranks]
        begun = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        took = time.perf_counter() - begun
    if done.returncode or f"{count * variants} passed" not in done.stdout:
        raise SystemExit(done.stdout + done.stderr)
    verdict = "kept" if took < MOST_S else "MISSED"
    print(f"{count * variants} tests on {options.ranks} ranks of {options.backends}: {took:.1f} s, start included")
    print(f"at most {MOST_S:g} s: {verdict}")


if __name__ == "__main__":
    main()
