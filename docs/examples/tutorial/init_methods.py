"""The three ways to meet without a launcher: the environment, a file, and a TCP address.

Here one script starts all ranks itself. In earnest, each host starts its own.

    python docs/examples/tutorial/init_methods.py --ranks 2 --method tcp
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import sys
import tempfile
from pathlib import Path

import torch

import unisono as un

METHODS = ("env", "file", "tcp")


def run(rank: int, ranks: int, init_method: str) -> None:
    """Connect this process to the others, and return their number."""
    if init_method == "env://":
        # The environment holds rank and world size too.
        comm = un.init("gloo", init_method=init_method, timeout=60)
    else:
        comm = un.init("gloo", init_method=init_method, rank=rank, world_size=ranks, timeout=60)
    with comm:
        count = torch.ones(1)
        comm.all_reduce(count)
        assert count.item() == ranks
        print(f"rank {comm.rank} of {comm.size} met the others by {init_method.partition(':')[0]}", flush=True)


def start(rank: int, ranks: int, method: str, address: str, folder: str) -> None:
    host, _, port = address.rpartition(":")
    if method == "env":
        # What torchrun, a cluster's own tools, or you at two terminals would set.
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=port, RANK=str(rank), WORLD_SIZE=str(ranks))
        run(rank, ranks, "env://")
    elif method == "file":
        run(rank, ranks, f"file://{Path(folder) / 'meeting'}")
    else:
        run(rank, ranks, f"tcp://{address}")


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def main(ranks: int, method: str) -> int:
    """Return the number of ranks that failed."""
    context = multiprocessing.get_context("forkserver")
    # Imported once, by the server that all ranks are forked from.
    context.set_forkserver_preload(["torch"])
    with tempfile.TemporaryDirectory() as folder:
        meeting = (method, free_address(), folder)
        processes = [context.Process(target=start, args=(rank, ranks, *meeting)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
        return sum(process.exitcode != 0 for process in processes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--method", choices=METHODS, default="tcp")
    given = parser.parse_args()
    sys.exit(main(given.ranks, given.method))
