"""Time of an all_reduce on tcp between two ranks on one host, with and without `UNISONO_TLS`.

    python benchmarks/encryption_cost.py [--runs 7]

Printed for each size: the median of both, and the ratio. Ranks are started for each run, encrypted and not in
turns. It needs the program `openssl`, for a certificate.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch
from _questions import parser

import unisono as un

SIZES = (64, 1 << 16, 1 << 20, 1 << 24)
CALLS = 20


def measure(comm: un.Communicator) -> list[float]:
    """Return the seconds of one all_reduce of each size."""
    found = []
    for size in SIZES:
        tensor = torch.ones(size // 4)
        comm.all_reduce(tensor)
        comm.barrier()
        started = time.perf_counter()
        for _ in range(CALLS):
            comm.all_reduce(tensor)
        found.append((time.perf_counter() - started) / CALLS)
    return found


def certificate(folder: Path) -> str:
    words = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1", "-subj", "/CN=job"]
    files = ["-keyout", folder / "key.pem", "-out", folder / "job.pem"]
    subprocess.run(["openssl", "req", "-x509", *words, *files], check=True, capture_output=True)
    (folder / "job.pem").chmod(0o600)
    with (folder / "job.pem").open("a") as both:
        both.write((folder / "key.pem").read_text())
    return str(folder / "job.pem")


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--runs", type=int, default=7, help="runs of each kind (%(default)s)")
    options = made.parse_args()
    plain = []
    encrypted = []
    with tempfile.TemporaryDirectory() as folder:
        path = certificate(Path(folder))
        for _ in range(options.runs):
            os.environ.pop("UNISONO_TLS", None)
            plain.append(un.launch(measure, 2, "tcp", threads=1)[0])
            os.environ["UNISONO_TLS"] = path
            encrypted.append(un.launch(measure, 2, "tcp", threads=1)[0])
    for index, size in enumerate(SIZES):
        without = statistics.median(run[index] for run in plain)
        within = statistics.median(run[index] for run in encrypted)
        print(f"{size:>9} bytes: {without * 1e6:7.0f} us, encrypted {within * 1e6:7.0f} us", end="")
        print(f" ({size / within / 1e6:.0f} MB/s), {within / without:.1f} times")


if __name__ == "__main__":
    main()
