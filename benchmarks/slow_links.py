"""Streaming DiLoCo, plain DiLoCo and DDP over a link of 50 Mbit/s and 100 ms latency: speed, bytes sent and loss.

    python benchmarks/slow_links.py [--hosts 2 4] [--rounds 5] [--seeds 3] [--only speed loss]

Speed: hosts are those of `unisono.testing.Network`, with one rank each, and 0.1 % of the packets are lost. A
transformer of 10 M parameters is trained without communication and by streaming DiLoCo (four fragments, overlapped,
int4) by turns, since the speed of cores changes; then by plain DiLoCo, and by DDP on gloo. The first round, in which
ranks agree on codecs, is not counted. Printed for each: steps per second, their share of those without communication on
the same cores, as a mean over ranks, and the bytes of a step that host 0 sends, with all headers. Where the kernel has
no netem, the network's relay moves packets on the same cores: of two, 2 % while four hosts stream.

Loss: a transformer of 0.5 M parameters learns the characters of the help texts that Python ships, on ranks of this
host, by the same three. Printed: the mean loss on a part that no rank has trained on, for each seed.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from _questions import parser
from _training import ddp, transformer
from torch import nn
from two_hosts import counted

import unisono as un
from unisono.testing import Network
from unisono.testing.namespaced_ranks import HostRanks, obstacle

EVERY = 100
STREAMING: dict[str, Any] = {"fragments": 4, "overlap_steps": 20, "compression": "int4"}
LINK: dict[str, Any] = {"rate": "50mbit", "delay": "50ms", "loss": 0.001}
DDP_STEPS = 4
IDLE_AT = 90
"""Number of a round's steps after which no exchange is under way."""
TIMEOUT_S = 3000.0
PORT = 29500
LEAST_SHARE = 0.95
LEAST_SAVING = 400
MOST_LOSS = 1.01

Step = Callable[[], object]


Taken = tuple[int, float, int]


def timed(comm: un.Communicator, step: Step, count: int) -> Taken:
    """Return the number of steps, and the seconds and bytes that they took."""
    comm.barrier()
    before = counted()
    started = time.perf_counter()
    for _ in range(count):
        step()
    return count, time.perf_counter() - started, counted() - before


def speeds(comm: un.Communicator, rounds: int) -> dict[str, list[Taken]]:
    """Return what each kind of training took, in parts."""
    torch.manual_seed(0)
    model = transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs = torch.randn(2, 32, 384, generator=torch.Generator().manual_seed(comm.rank))

    def step(forward: nn.Module = model) -> None:
        optimizer.zero_grad()
        forward(inputs).square().mean().backward()
        optimizer.step()

    step()
    alone: list[Taken] = []
    streaming: list[Taken] = []
    un.broadcast_parameters(model, comm)
    with un.gradients.DiLoCo(model, comm, EVERY, **STREAMING) as diloco:
        for part in range(rounds + 1):
            handle = diloco.attach(optimizer)
            # Exchanges begin and end within a part. In the first one ranks agree on codecs, too.
            taken = timed(comm, step, EVERY if part else IDLE_AT)
            handle.remove()
            alone.append(timed(comm, step, EVERY))
            if part:
                streaming.append(taken)
    found = {"alone": alone, "streaming": streaming}
    un.broadcast_parameters(model, comm)
    with un.gradients.DiLoCo(model, comm, EVERY) as diloco:
        handle = diloco.attach(optimizer)
        found["DiLoCo"] = [timed(comm, step, EVERY)]
        handle.remove()
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    address = f"tcp://{os.environ['MASTER_ADDR']}:{PORT}"
    dist.init_process_group("gloo", init_method=address, rank=comm.rank, world_size=comm.size)
    wrapped = ddp(model, None)
    step(wrapped)
    found["DDP on gloo"] = [timed(comm, lambda: step(wrapped), DDP_STEPS)]
    dist.destroy_process_group()
    return found


def show_speeds(hosts: int, rounds: int) -> None:
    with Network(hosts, **LINK) as network:
        print(f"# {hosts} hosts, {network.report()}", flush=True)
        options: dict[str, Any] = {"timeout": TIMEOUT_S}
        with HostRanks(network, (1,) * hosts, speeds, rounds, backend="tcp", options=lambda _: options) as ranks:
            found = ranks.results(TIMEOUT_S)
    for each in found:
        if not isinstance(each, dict):
            raise SystemExit(f"a rank failed: {each!r}")
    rates = {}
    sizes = {}
    for name, of_first in found[0].items():
        steps, seconds, _ = map(sum, zip(*(part for each in found for part in each[name]), strict=True))
        rates[name] = steps / seconds
        sizes[name] = sum(nbytes for _, _, nbytes in of_first) / sum(steps for steps, _, _ in of_first)
        share = rates[name] / rates["alone"]
        print(f"{name:12} {rates[name]:7.2f} steps/s, {share:6.1%} of alone, {sizes[name]:12,.0f} bytes a step")
    share = rates["streaming"] / rates["alone"]
    saving = sizes["DDP on gloo"] / sizes["streaming"]
    print(f"streaming keeps {share:.1%}, bound {LEAST_SHARE:.0%}: {'kept' if share >= LEAST_SHARE else 'MISSED'}")
    print(
        f"DDP sends {saving:.0f} times as much, bound {LEAST_SAVING}: {'kept' if saving >= LEAST_SAVING else 'MISSED'}"
    )


class Characters(nn.Module):
    """A transformer that predicts the next character: 0.5 M parameters."""

    def __init__(self, known: int, length: int, width: int = 112, layers: int = 3) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.embed = nn.Embedding(known, width)
        self.place = nn.Parameter(torch.zeros(length, width))
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, known)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(text) + self.place, mask=self.mask, is_causal=True))


def losses(comm: un.Communicator, kind: str, seed: int, steps: int, length: int = 64, batch: int = 8) -> float:
    """Train, and return the loss on the last tenth of the text."""
    text = "".join(topics[name] for name in sorted(topics))
    known = sorted(set(text))
    codes = {character: code for code, character in enumerate(known)}
    everything = torch.tensor([codes[character] for character in text])
    cut = len(everything) * 9 // 10
    torch.manual_seed(seed)
    model = Characters(len(known), length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    averager: Any
    if kind == "DDP":
        averager = un.GradientAverager(model, comm)
    else:
        averager = un.gradients.DiLoCo(model, comm, EVERY, **(STREAMING if kind == "streaming" else {}))
        averager.attach(optimizer)
    draw = random.Random(1000 * seed + comm.rank)
    places = torch.arange(length)
    for _ in range(steps):
        starts = torch.tensor([draw.randrange(cut - length - 1) for _ in range(batch)])
        window = starts.unsqueeze(1) + places
        optimizer.zero_grad()
        loss_of(model, everything, window).backward()
        optimizer.step()
        warmup.step()
    if kind == "streaming":
        averager.finish()
    with torch.no_grad():
        starts = torch.arange(cut, len(everything) - length - 1, length)
        parts = [loss_of(model, everything, (part.unsqueeze(1) + places)).item() for part in starts.split(64)[:-1]]
    return statistics.mean(parts)


def loss_of(model: nn.Module, text: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
    said = model(text[window])
    return nn.functional.cross_entropy(said.flatten(0, 1), text[window + 1].flatten())


def show_losses(ranks: int, seeds: int, steps: int) -> None:
    kinds = ("streaming", "DiLoCo", "DDP")
    found = {
        kind: [un.launch(losses, ranks, args=(kind, s, steps), threads=1)[0] for s in range(seeds)] for kind in kinds
    }
    size = sum(p.numel() for p in Characters(100, 64).parameters())
    print(f"# {ranks} ranks, {size / 1e6:.2f} M parameters, {steps} steps", flush=True)
    for kind, each in found.items():
        print(f"{kind:12} loss {statistics.mean(each):.4f} ({', '.join(f'{loss:.4f}' for loss in each)})")
    means = {kind: statistics.mean(each) for kind, each in found.items()}
    ratio = means["streaming"] / means["DiLoCo"]
    print(f"streaming over DiLoCo {ratio:.4f}, bound {MOST_LOSS}: {'kept' if ratio <= MOST_LOSS else 'MISSED'}")
    print(f"streaming over DDP {means['streaming'] / means['DDP']:.4f}")


def main() -> None:
    made = parser(__doc__)
    made.add_argument(
        "--hosts", type=int, nargs="+", default=[2, 4], help="numbers of hosts, and of ranks (%(default)s)"
    )
    made.add_argument("--rounds", type=int, default=5, help="outer rounds (%(default)s)")
    made.add_argument("--seeds", type=int, default=3, help="seeds of the losses (%(default)s)")
    made.add_argument("--steps", type=int, default=1000, help="steps of the losses (%(default)s)")
    made.add_argument("--only", nargs="+", choices=("speed", "loss"), default=["speed", "loss"])
    options = made.parse_args()
    if "speed" in options.only:
        if (reason := obstacle(slow=True)) is not None:
            raise SystemExit(reason)
        for hosts in options.hosts:
            show_speeds(hosts, options.rounds)
    if "loss" in options.only:
        for ranks in options.hosts:
            show_losses(ranks, options.seeds, options.steps)


if __name__ == "__main__":
    main()
