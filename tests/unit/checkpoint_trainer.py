"""Training on digits that is killed again and again, and goes on from its last checkpoint on other numbers of ranks.

    python checkpoint_trainer.py DIRECTORY KILLS RANKS [RANKS ...]

The ranks are those of one attempt after another. It forks, since a new interpreter would take seconds each time.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import traceback
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

import unisono as un

SAMPLES, BATCH, EPOCHS, EVERY = 360, 12, 2, 3
STEPS = SAMPLES // BATCH * EPOCHS


def train(
    comm: un.Communicator, folder: Path, pixels: torch.Tensor, labels: torch.Tensor, tell: Any
) -> list[torch.Tensor]:
    """All steps from the last checkpoint on; `tell` hears of each step, and on which samples it was."""
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = un.data.PartitionSampler(pixels, comm, seed=5)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "sampler": sampler, "step": 0}
    with un.checkpoint.Checkpointer(folder, comm, keep=2, every=EVERY) as checkpointer:
        checkpointer.load(state)
        while state["step"] < STEPS:
            sampler.set_epoch(state["step"] // (SAMPLES // BATCH))
            indices = iter(sampler)
            while state["step"] < STEPS and (mine := list(islice(indices, BATCH // comm.size))):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(pixels[mine]), labels[mine], reduction="sum") / BATCH
                loss.backward()
                for parameter in model.parameters():
                    comm.all_reduce(parameter.grad)
                optimizer.step()
                sampler.advance(len(mine))
                state["step"] += 1
                everyone = comm.all_gather_object(mine)
                if comm.rank == 0:
                    tell(state["step"], sorted(chain.from_iterable(everyone)))
                checkpointer.step(state["step"], state)
    return [parameter.detach() for parameter in model.parameters()]


def attempt(folder: Path, ranks: int, given: tuple[torch.Tensor, torch.Tensor], told: int) -> None:
    """One process: it tells each step by a line, and its weights at the end."""

    def tell(step: int, samples: list[int]) -> None:
        os.write(told, json.dumps([step, samples]).encode() + b"\n")

    # After a fork torch recreates its threads on first use, which two threads must not trigger concurrently.
    torch.set_num_threads(1)
    weights = un.launch(train, ranks, "thread", (folder, *given, tell))
    torch.save(weights[0], folder.with_suffix(".weights"))


def run(folder: Path, ranks: list[int], chance: random.Random, kills: int, given: Any) -> tuple[dict[int, Any], int]:
    """Attempts until one comes to the end; the samples of each step, and how often it was killed."""
    steps: dict[int, Any] = {}
    for killed in range(1000):
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            code = 1
            try:
                attempt(folder, ranks[killed % len(ranks)], given, writer)
                code = 0
            except BaseException:
                # No other process reports it, because this one ends immediately.
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(writer)
        lines = os.fdopen(reader)
        left = chance.randint(1, 12) if killed < kills else STEPS
        for line in lines:
            if not line.endswith("\n"):
                break
            step, samples = json.loads(line)
            assert steps.setdefault(step, samples) == samples, f"step {step} again, on other samples"
            left -= 1
            # What it has told until then is read to the end.
            if left == 0 and killed < kills:
                os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code == 0:
            return steps, killed
        assert code == -signal.SIGKILL, f"attempt {killed} failed with {code}"
    raise AssertionError("it came to no end")


def main() -> None:
    torch.set_num_threads(1)
    folder, kills, ranks = Path(sys.argv[1]), int(sys.argv[2]), [int(r) for r in sys.argv[3:]]
    digits = load_digits()
    given = torch.tensor(digits.data[:SAMPLES] / 16, dtype=torch.float64), torch.tensor(digits.target[:SAMPLES])
    # The first optimizer of a process imports for seconds: not in each that is forked.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    chance = random.Random(3)
    wanted, _ = run(folder / "unbroken", ranks[:1], chance, 0, given)
    assert sorted(wanted) == list(range(1, STEPS + 1))
    weights = torch.load(folder / "unbroken.weights", weights_only=True)
    found = {"killed": 0, "runs": 0, "furthest": 0.0}
    while found["killed"] < kills:
        name = folder / f"run-{found['runs']}"
        steps, killed = run(name, ranks, chance, min(kills - int(found["killed"]), 10), given)
        assert steps == wanted, "other samples than without a break"
        others = torch.load(name.with_suffix(".weights"), weights_only=True)
        distance = max(float((a - b).abs().max()) for a, b in zip(weights, others, strict=True))
        found["furthest"] = max(found["furthest"], distance)
        found["killed"] += killed
        found["runs"] += 1
    print(json.dumps(found))


if __name__ == "__main__":
    main()
