"""Table of optimizers whose states can be sharded: classes from torch and other packages, under ZeRO-1, 2 and 3.

Three ranks on threads train with gradients whose scale goes up and down, some of which are missing, two groups and a
schedule; parameters have one to three dimensions, and one has 20,800 elements. A class that takes no groups of its own
has one, and one that takes nothing but matrices has these. Halfway the state is saved, and loaded into a new optimizer.
All ranks have the same batch, so that averages round nothing. Each class is given lr=0.01, momentum=0.9 if it
has momentum, and its own defaults. An outcome is one of

    shards      parameters and the numbers in the groups are those of one process
    refused     an error when the optimizer is created, or an error of a step on every rank
    WRONG       anything else

Classes that do not train here in one process, and are not refused when they are created, are listed below the table.

To make the table, in an environment with the packages:

    pip install unisono schedulefree prodigyopt dadaptation lion-pytorch bitsandbytes torchao pytorch_optimizer
    python benchmarks/optimizer_table.py [PACKAGE ...] [--only PATTERN]
"""

from __future__ import annotations

import importlib
import inspect
import re
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from _questions import parser
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import unisono as un
from unisono.sharding.flat_parameters import ParameterPiece
from unisono.sharding.shard_optimizer import check_elementwise

PACKAGES = {
    "torch.optim": "torch",
    "schedulefree": "schedulefree",
    "prodigyopt": "prodigyopt",
    "dadaptation": "dadaptation",
    "lion_pytorch": "lion-pytorch",
    "bitsandbytes.optim": "bitsandbytes",
    "torchao.optim": "torchao",
    "pytorch_optimizer": "pytorch_optimizer",
}
"""Modules, and the distributions that have them."""
RANKS = 3
STEPS = 10
KINDS = ("ZeRO-1", "ZeRO-2", "ZeRO-3")


class Layout(NamedTuple):
    """Shapes of the parameters, and in how many groups these are."""

    shapes: tuple[tuple[int, ...], ...] = ((160, 130), (31,), (3, 5), (2, 3, 4), (7, 2))
    groups: int = 2


LAYOUTS = (Layout(), Layout(groups=1), Layout(((160, 130), (3, 5), (31, 7), (7, 2)), 1))


class Net(nn.Module):
    """Parameters whose loss has another scale in each step, and leaves some of them out."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(11)
        self.layout = layout
        self.values = nn.ParameterList(nn.Parameter(torch.randn(s, generator=generator)) for s in layout.shapes)

    def forward(self, step: int) -> torch.Tensor:
        """Return the loss of a step."""
        generator = torch.Generator().manual_seed(100 + step)
        targets = [torch.randn(value.shape, generator=generator) for value in self.values]
        errors = [(value - target).square().mean() for value, target in zip(self.values, targets, strict=True)]
        used = errors[:3] if step % 4 == 2 else errors
        return torch.stack(used).sum() * 10.0 ** (step % 5 - 2)

    def groups(self) -> list[dict[str, Any]]:
        """Return the groups of parameters."""
        values = list(self.values)
        if self.layout.groups == 1:
            return [{"params": values}]
        return [{"params": values[:2]}, {"params": values[2:], "lr": 0.005}]


Made = tuple[Optimizer, Callable[[], list[torch.Tensor]]]
"""An optimizer, and what returns the whole parameters."""


def make(kind: str, model: Net, comm: un.Communicator, optimizer_class: type[Optimizer], options: Any) -> Made:
    """Shard a model in one way."""
    if kind == "ZeRO-3":
        sharded = un.sharding.ShardedModel(model, comm)

        def whole() -> list[torch.Tensor]:
            with sharded.full_parameters(writeback=False):
                return [p.detach().clone() for p in model.parameters()]

        return sharded.optimizer(optimizer_class, model.groups(), **options), whole
    shard_gradients = kind == "ZeRO-2"
    if not shard_gradients:
        un.GradientAverager(model, comm)
    optimizer = un.sharding.ShardedOptimizer(
        optimizer_class, model.groups(), comm, shard_gradients=shard_gradients, **options
    )
    return optimizer, lambda: [p.detach().clone() for p in model.parameters()]


def train(optimizer: Optimizer, model: Net, steps: range) -> None:
    """Make some steps."""
    schedule = LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    if hasattr(optimizer, "train"):
        optimizer.train()
    for step in steps:
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()
        schedule.step()


def numbers(optimizer: Optimizer) -> list[dict[str, float]]:
    """Return the numbers in the groups."""
    found = [{k: plain(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return [{k: float(v) for k, v in group.items() if isinstance(v, int | float)} for group in found]


def plain(value: Any) -> Any:
    """Return a tensor of one element as a number."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


Ending = tuple[list[torch.Tensor], list[dict[str, float]]]


def alone(layout: Layout, optimizer_class: type[Optimizer], options: Any) -> Ending:
    """Train in one process."""
    model = Net(layout)
    optimizer = optimizer_class(model.groups(), **options)
    train(optimizer, model, range(STEPS // 2))
    resumed = optimizer_class(model.groups(), **options)
    resumed.load_state_dict(optimizer.state_dict())
    train(resumed, model, range(STEPS // 2, STEPS))
    if not all(p.isfinite().all() for p in model.parameters()):
        raise ValueError("parameters become infinite")
    return [p.detach().clone() for p in model.parameters()], numbers(resumed)


def sharded(comm: un.Communicator, kind: str, layout: Layout, *optimizer: Any) -> Ending | str:
    """Train on all ranks. Return the text of an error."""
    try:
        return _sharded(comm, kind, layout, *optimizer)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _sharded(
    comm: un.Communicator, kind: str, layout: Layout, optimizer_class: type[Optimizer], options: Any
) -> Ending:
    model = Net(layout)
    optimizer, whole = make(kind, model, comm, optimizer_class, options)
    train(optimizer, model, range(STEPS // 2))
    other = Net(layout)
    with torch.no_grad():
        for parameter, value in zip(other.parameters(), whole(), strict=True):
            parameter.copy_(value)
    resumed, whole = make(kind, other, comm, optimizer_class, options)
    resumed.load_state_dict(optimizer.state_dict())
    train(resumed, other, range(STEPS // 2, STEPS))
    return whole(), numbers(resumed)


def verdict(kind: str, layout: Layout, optimizer: Any, wanted: Ending) -> tuple[str, str]:
    """Return the outcome of one way to shard, and the reason."""
    try:
        found = un.launch(sharded, RANKS, "thread", args=(kind, layout, *optimizer), timeout=30)
    except Exception as error:
        return "WRONG", f"{type(error).__name__}: {error}"
    errors = [end for end in found if isinstance(end, str)]
    if errors:
        own = [text for text in errors if "aborted" not in text] or errors
        return ("refused" if len(errors) == RANKS else "WRONG"), own[0]
    for parameters, groups in found:
        for one, other, start in zip(parameters, wanted[0], Net(layout).parameters(), strict=True):
            size = (other - start).detach().abs().max().item() + 1e-12
            if not (one - other).abs().max().item() <= 1e-3 * size:
                return "WRONG", "parameters differ from those of one process"
        for group, expected in zip(groups, wanted[1], strict=True):
            if group.keys() != expected.keys() or any(abs(group[k] - v) > 1e-4 * abs(v) for k, v in expected.items()):
                return "WRONG", "the numbers in the groups differ from those of one process"
    return "shards", ""


def classes(module: str) -> Iterator[type[Optimizer]]:
    """Return the optimizers of a module."""
    for name, value in sorted(vars(importlib.import_module(module)).items()):
        public = inspect.isclass(value) and not name.startswith("_")
        if public and issubclass(value, Optimizer) and value is not Optimizer:
            yield value


def options_of(optimizer_class: type[Optimizer]) -> dict[str, Any]:
    """Return the options with which a class is made."""
    known = inspect.signature(optimizer_class.__init__).parameters
    return {name: value for name, value in (("lr", 0.01), ("momentum", 0.9)) if name in known}


def trial(layout: Layout, optimizer_class: type[Optimizer], options: Any) -> tuple[float, str]:
    """Return how long the trial takes when the optimizer is created, in seconds, and why it refuses the class."""
    groups = [
        {
            **group,
            "params": [ParameterPiece("p", p.shape, 0, nn.Parameter(p.detach().reshape(-1))) for p in group["params"]],
        }
        for group in Net(layout).groups()
    ]
    reason = ""
    began = time.perf_counter()
    try:
        check_elementwise(optimizer_class, groups, options)
    except ValueError as error:
        reason = str(error)
    return time.perf_counter() - began, reason


def tried(optimizer_class: type[Optimizer], options: Any) -> tuple[list[tuple[str, str]], float]:
    """Return the outcomes of all ways to shard, and the time of the trial.

    Raises:
        Exception: It trains in no layout in one process.
    """
    failed: list[Exception] = []
    for layout in LAYOUTS:
        try:
            wanted = alone(layout, optimizer_class, options)
        except Exception as error:
            failed.append(error)
            continue
        took_s, _ = trial(layout, optimizer_class, options)
        return [verdict(kind, layout, (optimizer_class, options), wanted) for kind in KINDS], took_s
    took_s, reason = trial(LAYOUTS[0], optimizer_class, options)
    if "failed in a trial" in reason or not reason:
        raise failed[-1]
    return [("refused", reason)] * len(KINDS), took_s


def short(reason: str) -> str:
    """Return the part of a reason that classes have in common."""
    text = re.sub(
        r"^(ValueError: )?\w+(\.step\(\))? (?=updates|keeps|draws|needs|changes|fails|failed)", "", reason.strip()
    )
    for end in ("\n", ", so its states", ". If each element", ", to compute", ", by "):
        text = text.partition(end)[0]
    text = re.sub(r"state_dict\(\)\S+", "state_dict()", text)
    return text.replace("|", "/")[:160]


def rows(module: str, pattern: str) -> Iterator[tuple[str, tuple[str, ...], str, float]]:
    """Return for each class of a module its name, the outcome of each way to shard, the reason, and the trial's time.

    A class that does not train here has no outcomes.
    """
    for optimizer_class in classes(module):
        if not re.fullmatch(pattern, optimizer_class.__name__):
            continue
        try:
            ends, took_s = tried(optimizer_class, options_of(optimizer_class))
        except Exception as error:
            yield optimizer_class.__name__, (), short(str(error)), 0.0
            continue
        reasons = dict.fromkeys(short(reason) for _, reason in ends if reason)
        yield optimizer_class.__name__, tuple(outcome for outcome, _ in ends), "; ".join(reasons), took_s


def main() -> None:
    """Print the table."""
    options = parser(__doc__)
    options.add_argument("packages", nargs="*", default=list(PACKAGES), metavar="PACKAGE", help=", ".join(PACKAGES))
    options.add_argument("--only", default=".*", metavar="PATTERN", help="classes whose names match this pattern")
    asked = options.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    times, counts, lacking = list[float](), Counter[str](), dict[str, list[str]]()
    for module in asked.packages:
        print(f"\n### {PACKAGES[module]} {version(PACKAGES[module])}\n")
        print("| classes | outcome | why not |\n|---|---|---|", flush=True)
        alike: dict[tuple[tuple[str, ...], str], list[str]] = {}
        for name, outcomes, reason, took_s in rows(module, asked.only):
            if not outcomes:
                lacking.setdefault(PACKAGES[module], []).append(f"`{name}`")
                continue
            alike.setdefault((outcomes, reason), []).append(f"`{name}`")
            counts.update(outcomes)
            times.append(took_s)
        for (outcomes, reason), names in sorted(alike.items(), reverse=True):
            differing = ", ".join(f"{kind} {outcome}" for kind, outcome in zip(KINDS, outcomes, strict=True))
            shown = outcomes[0] if len(set(outcomes)) == 1 else differing
            print(f"| {', '.join(names)} | {shown} | {reason} |", flush=True)
    print("\nNot tried:\n")
    print(*(f"- {package}: {', '.join(names)}" for package, names in lacking.items()), sep="\n")
    if times:
        print(f"\n{dict(counts)}; a trial took {statistics.median(times):.2f} s, at most {max(times):.2f} s")
    if counts["WRONG"]:
        raise SystemExit("Some are wrong")


if __name__ == "__main__":
    main()
