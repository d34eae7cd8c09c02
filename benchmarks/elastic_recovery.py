"""Time from the SIGKILL of one of four ranks in sharded training (ZeRO-3) to the end of the next step.

All train a transformer of 10.6 M parameters with Adam, one thread per rank. Nothing is in a file: the shards of a dead
rank are at its neighbour. The training then goes on, and its losses are compared with those of one rank that was not
disturbed. With float64 they differ by less than 1e-9. A second line has what a commit costs: it sends this rank's part
of the parameters and of Adam's two states, and waits for the slowest rank.

Results are in docs/benchmarks.md. To measure on your machine:

    python benchmarks/elastic_recovery.py [--backend shm] [--jobs 3] [--dtypes float64 float32]
"""

from __future__ import annotations

import os
import signal
import time
from statistics import median
from typing import Any

import torch
from _questions import parser
from _training import transformer

import unisono as un

RANKS, VICTIM, DIES_AT, STEPS, BATCH = 4, 2, 3, 6, 12


def train(comm: un.Communicator, dies: bool, dtype: torch.dtype) -> dict[str, Any]:
    """Train on the same batches on any number of ranks; return the losses, and times in seconds."""
    torch.manual_seed(1)
    model = transformer().to(dtype)
    me, draw = comm.rank, torch.Generator().manual_seed(2)
    batches = torch.randn(STEPS, BATCH, 16, 384, generator=draw, dtype=dtype)
    sharded = un.sharding.ShardedModel(model, comm)
    optimizer = sharded.optimizer(torch.optim.Adam, lr=1e-4)
    going = un.elastic.Recovery(comm, model=sharded, optimizer=optimizer)
    losses: list[float] = []
    found: dict[str, Any] = {"losses": losses, "steps": [], "commits": []}
    while going.step < STEPS:
        try:
            began = time.monotonic()
            if dies and me == VICTIM and going.step == DIES_AT:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            mine = batches[going.step][going.comm.rank :: going.comm.size]
            loss = model(mine).square().mean()
            loss.backward()
            optimizer.step()
            mean = loss.detach().clone()
            going.comm.all_reduce(mean, "avg")
            stepped = time.monotonic()
            going.commit()
            losses.append(mean.item())
            found["steps"].append(stepped - began)
            found["commits"].append(time.monotonic() - stepped)
            if "failed" in found and "back_s" not in found:
                # The victim begins the step when the others do, so this is since its death.
                found["back_s"] = time.monotonic() - found["failed"]
        except un.CommError:
            found.setdefault("failed", began)
            noticed = time.monotonic()
            going.recover()
            found["recover_s"] = time.monotonic() - noticed
    found["size"] = going.comm.size
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--backend", default="shm")
    options.add_argument("--jobs", type=int, default=3)
    options.add_argument("--dtypes", nargs="+", choices=["float64", "float32"], default=["float64", "float32"])
    given = options.parse_args()
    for name in given.dtypes:
        print(name, flush=True)
        measure(getattr(torch, name), given.backend, given.jobs)


def measure(dtype: torch.dtype, backend: str, jobs: int) -> None:
    """Print two lines for each of some jobs."""
    calm = un.launch(train, 1, "thread", (False, dtype))[0]
    for _ in range(jobs):
        ends = un.launch(train, RANKS, backend, (True, dtype), threads=1, on_failure="continue", timeout=60.0)
        alive = [end for end in ends if isinstance(end, dict)]
        if len(alive) != RANKS - 1 or any(end["size"] != RANKS - 1 or len(end["losses"]) != STEPS for end in alive):
            raise SystemExit(f"the training did not go on: {ends}")
        far = max(abs(a - b) for end in alive for a, b in zip(end["losses"], calm["losses"], strict=True))
        back, inside = (max(end[key] for end in alive) for key in ("back_s", "recover_s"))
        print(
            f"{backend}: next step ends {back:.2f} s after the death, of which recover() {inside:.2f} s",
            flush=True,
        )
        step, commit = (median(alive[0][key]) for key in ("steps", "commits"))
        print(f"  step {step * 1e3:.0f} ms, commit {commit * 1e3:.1f} ms; losses differ by {far:.1e}", flush=True)


if __name__ == "__main__":
    main()
