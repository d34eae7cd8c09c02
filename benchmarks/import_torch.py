"""What does unisono's entry point add to `import torch`?

Answer: see docs/benchmarks.md; run it to see yours:

    python benchmarks/import_torch.py [--pairs 20]

Each pair is two new processes, one of which has TORCH_DEVICE_BACKEND_AUTOLOAD=0, in alternating order; a line is the
median of the differences of processor time, which other programs disturb less than the clock.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

PROGRAM = "import time, torch; print(time.process_time())"


def seconds(autoload: str) -> float:
    """Processor time of a process that imports torch, up to the end of the import."""
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload, "OMP_NUM_THREADS": "1"}
    return float(
        subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, check=True).stdout
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    pairs = parser.parse_args().pairs
    times: dict[str, list[float]] = {"0": [], "1": []}
    for pair in range(pairs + 1):
        for autoload in "01" if pair % 2 else "10":
            times[autoload].append(seconds(autoload))
    added = sorted(new - old for old, new in zip(times["0"][1:], times["1"][1:], strict=True))
    low, _, high = statistics.quantiles(added, n=4)
    median = statistics.median(added)
    verdict = "" if median < 0.01 else "   MISSED 10 ms"
    print(
        f"import torch {statistics.median(times['0']) * 1e3:.0f} ms, entry point {median * 1e3:+.1f} ms "
        f"({low * 1e3:+.1f} to {high * 1e3:+.1f}, {pairs} pairs){verdict}"
    )


if __name__ == "__main__":
    main()
