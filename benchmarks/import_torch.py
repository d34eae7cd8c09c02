"""Time that unisono's entry point adds to `import torch`.

Results are in docs/benchmarks.md. To measure on your machine:

    python benchmarks/import_torch.py [--pairs 20]

Each pair is two new processes, one with TORCH_DEVICE_BACKEND_AUTOLOAD=0, in alternating order; a line is the median
of the differences of processor time, which other programs affect less than wall-clock time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

from _questions import parser

from unisono.tools.bench import interleave

PROGRAM = "import time, torch; print(time.process_time())"


def seconds(autoload: str) -> float:
    """Return the processor time of a process that imports torch, up to the end of the import."""
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload, "OMP_NUM_THREADS": "1"}
    return float(
        subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, check=True).stdout
    )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--pairs", type=int, default=20)
    pairs = options.parse_args().pairs
    timings = interleave({autoload: partial(seconds, autoload) for autoload in "01"}, rounds=pairs, warmup=1)
    added = timings.difference("1", "0") * 1e3
    verdict = "" if added.median < 10 else "   MISSED 10 ms"
    print(
        f"import torch {timings.of('0').median * 1e3:.0f} ms, entry point {added.median:+.1f} ms "
        f"({added.low:+.1f} to {added.high:+.1f}, {pairs} pairs){verdict}"
    )


if __name__ == "__main__":
    main()
