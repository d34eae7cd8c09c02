"""Random trainings with sharded optimizers and models, beside the same training in one process.

`python tests/fuzz/sharded_fuzzing.py SEED BACKEND SIZE [compiled]` runs one seed, and prints its program.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from pprint import pformat
from random import Random
from typing import Any

import torch
from drawn_optimizers import Kind, draw_kind
from torch import nn
from torch.utils._pytree import tree_flatten_with_path

import unisono as un
from unisono.checkpoint import TensorShard
from unisono.errors import CommError
from unisono.testing import pool

__all__ = ["Program", "draw", "failures"]

WIDTH = 3
SAMPLES = 4
_BATCH = 5
"""Programs that ranks run in one go, within the limit of their pool: twenty take over a minute on a busy machine."""
_ATTEMPTS = 6
_TOLERANCES = {"float64": 1e-8, "float32": 2e-3}

Names = frozenset[str]


# -- programs ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Pass:
    """One `backward()`.

    Attributes:
        seed: Of the batch.
        sync: Whether gradients are averaged.
        skips: For each rank the blocks that only pass on their input; the same ones if gradients are sharded.
        frozen: Parameters that are frozen from now on; all others are thawed.
        orders: For each rank the order in which it adds up the terms of the loss, one for each model.
        runs: The order in which it runs the models; the same one on all ranks if parameters are sharded.
    """

    seed: int
    sync: bool
    skips: tuple[frozenset[int], ...]
    frozen: Names
    orders: tuple[tuple[int, ...], ...] = ()
    runs: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Step:
    """Some passes, and one step of the optimizer.

    Attributes:
        zero: Who drops the gradients at first: "optimizer" or "model".
        clip: Largest norm of gradients and its order, or None.
        rate: Factor of all learning rates, as of a schedule.
        closure: Whether passes run inside `optimizer.step()`.
        failing: The ranks on which a pass raises when it is tried first.
        fails: The pass that raises, and the block behind which it does: not before the first linear one, which is
            always trained.
        flat: Whether gradients are views of one tensor of the user's before the first pass.
    """

    passes: tuple[Pass, ...]
    zero: str = "optimizer"
    clip: tuple[float, float] | None = None
    rate: float = 1.0
    closure: bool = False
    failing: frozenset[int] = frozenset()
    fails: tuple[int, int] = (0, 0)
    flat: bool = False


@dataclass(frozen=True)
class Segment:
    """Steps between two loads of the state.

    Attributes:
        stage: Of ZeRO: 1, 2 or 3.
        cap: Size of a bucket in MiB.
        files: Whether the state of the segment before comes from a checkpoint, or else from `state_dict()`.
        steps: What is done.
    """

    stage: int
    cap: float
    files: bool
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Program:
    """A model, an optimizer, and what is done with them.

    Attributes:
        blocks: Kinds of the blocks of the model: "linear", "scale", "wide", "cube" or "tied".
        frozen: Parameters that are never trained.
        groups: Names and options of the parameters of each group; empty for one group of all.
        kind: Class and options of the optimizer.
        elementwise: Whether it is declared to be elementwise.
        models: Number of equal models, each with its own optimizer and batches; their losses share one `backward()`.
    """

    seed: int
    size: int
    dtype: str
    blocks: tuple[str, ...]
    frozen: Names
    groups: tuple[tuple[tuple[str, ...], dict[str, float]], ...]
    kind: Kind
    elementwise: bool
    segments: tuple[Segment, ...]
    models: int = 1


def draw(seed: int, size: int) -> Program:
    """Return the program of a seed for this many ranks."""
    draw = Random(f"{seed}, {size}")
    blocks = ["linear", *draw.choices(["linear", "linear", "scale", "wide", "cube", "tied"], k=draw.randint(1, 4))]
    draw.shuffle(blocks)
    names = [name for name, _ in Model(tuple(blocks), torch.float64).named_parameters()]
    first = f"blocks.{blocks.index('linear')}."
    some = [name for name in names if not name.startswith(first)]
    kind = draw_kind(draw)
    # In single precision few steps, as rounding grows.
    dtype = "float32" if draw.random() < 0.1 else "float64"
    count = 1 if dtype == "float32" else draw.choice([1, 1, 1, 1, 1, 1, 2, 2, 2, 3])
    stages = [draw.choice([1, 2, 3])] * count if draw.random() < 0.6 else draw.choices([1, 2, 3], k=count)
    groups: list[tuple[tuple[str, ...], dict[str, float]]] = []
    if draw.random() < 0.6:
        parts = draw.randint(1, 3)
        placed = {name: draw.randrange(parts) for name in names}
        chosen = [tuple(n for n in names if placed[n] == part) for part in range(parts)]
        rates = [{"lr": draw.choice([0.01, 0.03, 0.1])} if draw.random() < 0.7 else {} for _ in range(parts)]
        groups = [(part, rate) for part, rate in zip(chosen, rates, strict=True) if part]
    program = Program(
        seed=seed,
        size=size,
        dtype=dtype,
        blocks=tuple(blocks),
        frozen=frozenset(n for n in some if draw.random() < 0.3) if draw.random() < 0.3 else frozenset(),
        groups=tuple(groups),
        kind=kind,
        elementwise=not kind.coupled and draw.random() < 0.9,
        segments=(),
    )
    # Where the borders of ranks' parts move, a state needs a checkpoint.
    cap = draw.choice([1e-5, 1e-4, 1.0])
    segments = [
        Segment(
            stage,
            cap=cap if len(set(stages)) == 1 else draw.choice([1e-5, 1e-4, 1.0]),
            files=number > 0 and (len(set(stages)) > 1 or draw.random() < 0.3),
            steps=tuple(
                _step(draw, program, stage, 100 * number + 10 * i, some)
                for i in range(draw.randint(1, 3 if dtype == "float64" else 2))
            ),
        )
        for number, stage in enumerate(stages)
    ]
    return _with_models(replace(program, segments=tuple(segments)))


def _with_models(program: Program) -> Program:
    """Return the program with some more models."""
    # Another generator, so that the seeds of known faults still draw the same programs.
    draw = Random(f"{program.seed}, {program.size}, models")
    models = draw.choice([2, 3]) if draw.random() < 0.25 else 1

    def ordered(one: Pass, stage: int) -> Pass:
        orders = tuple(tuple(draw.sample(range(models), models)) for _ in range(program.size))
        return replace(one, orders=orders, runs=orders[:1] * program.size if stage == 3 else orders)

    def reordered(segment: Segment) -> Segment:
        steps = [replace(s, passes=tuple(ordered(one, segment.stage) for one in s.passes)) for s in segment.steps]
        return replace(segment, steps=tuple(steps))

    segments = tuple(map(reordered, program.segments))
    return replace(program, segments=segments, models=models)


def _step(draw: Random, program: Program, stage: int, seed: int, some: Sequence[str]) -> Step:
    frozen = program.frozen
    passes: list[Pass] = []
    count = draw.choice([1, 1, 1, 2, 3])
    for i in range(count):
        # Ranks must agree on the frozen ones; ZeRO-3 takes those of the start only. An averager leaves what waits.
        if stage != 3 and (i == 0 or stage == 2) and draw.random() < 0.2:
            frozen = program.frozen | {name for name in some if draw.random() < 0.4}
        sync = i == count - 1 or draw.random() < 0.3
        passes.append(Pass(seed + i, sync, _skips(draw, program, stage), frozen))
    failing = frozenset[int]()
    if draw.random() < 0.15:
        failing = frozenset(draw.sample(range(program.size), draw.randint(1, program.size)))
    return Step(
        tuple(passes),
        zero="model" if stage != 3 and draw.random() < 0.4 else "optimizer",
        clip=(draw.choice([0.01, 0.3, 100.0]), draw.choice([2.0, 2.0, 1.0, torch.inf]))
        if draw.random() < 0.3
        else None,
        rate=draw.choice([1.0, 1.0, 0.5, 2.0]),
        closure=draw.random() < 0.15 and not (failing and stage == 3),
        failing=failing,
        fails=(draw.randrange(count), draw.randrange(program.blocks.index("linear"), len(program.blocks))),
        flat=stage == 1 and draw.random() < 0.2,
    )


def _skips(draw: Random, program: Program, stage: int) -> tuple[frozenset[int], ...]:
    first = program.blocks.index("linear")
    chance = draw.choice([0.0, 0.0, 0.4])

    def one() -> frozenset[int]:
        return frozenset(i for i in range(len(program.blocks)) if i != first and draw.random() < chance)

    return tuple(one() for _ in range(program.size)) if stage == 1 else (one(),) * program.size


# -- what is trained -----------------------------------------------------------------------------------
class PlannedError(Exception):
    """A failure that the program asks for."""


class _Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the input."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Fail."""
        raise PlannedError


class Block(nn.Module):
    """One of the blocks of a model."""

    def __init__(self, kind: str, tied: nn.Parameter | None, parameter: Callable[..., nn.Parameter]) -> None:
        super().__init__()
        self.kind = kind
        if kind == "scale":
            self.weight = parameter(WIDTH)
        elif kind == "cube":
            self.weight = parameter(2, WIDTH, WIDTH)
        elif kind == "wide":
            self.weight = parameter(170, WIDTH)
            self.down = parameter(WIDTH, 170)
        else:
            self.weight = parameter(WIDTH, WIDTH) if tied is None else tied
            self.bias = parameter(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output."""
        if self.kind == "scale":
            return x * self.weight
        if self.kind == "cube":
            return torch.tanh(x @ self.weight[0]) + x @ self.weight[1]
        if self.kind == "wide":
            return torch.tanh(x @ self.weight.T) @ self.down.T / 13
        return torch.tanh(x @ self.weight + self.bias)


class Model(nn.Module):
    """Blocks one after the other. A tied block has the weight of the first linear one."""

    def __init__(self, kinds: tuple[str, ...], dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))

        blocks = {i: Block(kind, None, parameter) for i, kind in enumerate(kinds) if kind != "tied"}
        weight = blocks[kinds.index("linear")].weight
        blocks |= {i: Block(kind, weight, parameter) for i, kind in enumerate(kinds) if kind == "tied"}
        self.blocks = nn.ModuleList(blocks[i] for i in range(len(kinds)))

    def forward(self, x: torch.Tensor, skips: frozenset[int], fails: int | None = None) -> torch.Tensor:
        """Return the output; the backward of block `fails` raises."""
        for number, block in enumerate(self.blocks):
            x = x if number in skips else x + block(x)
            if number == fails:
                x = _Raise.apply(x)
        return x


def make_model(program: Program) -> Model:
    """Return the model of a program."""
    model = Model(program.blocks, getattr(torch, program.dtype))
    freeze(model, program.frozen)
    return model


def freeze(model: Model, names: Names) -> None:
    """Freeze some parameters, and train all others."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad is (name in names):
            parameter.requires_grad_(name not in names)


def flatten(program: Program, model: Model) -> None:
    """Let gradients be views of one tensor of zeros."""
    used = [p for name, p in model.named_parameters() if name not in program.frozen]
    flat = torch.zeros(sum(p.numel() for p in used), dtype=used[0].dtype)
    for parameter, grad in zip(used, flat.split([p.numel() for p in used]), strict=True):
        parameter.grad = grad.view_as(parameter)


def groups_of(program: Program, model: Model) -> list[dict[str, Any]]:
    """Return the groups of the model's parameters."""
    named = dict(model.named_parameters())
    groups = program.groups or ((tuple(named), {}),)
    return [{"params": [named[name] for name in names], **options} for names, options in groups]


Batches = list[tuple[torch.Tensor, torch.Tensor]]
"""For each model the inputs, and the factor of its loss."""


def batches_of(program: Program, one: Pass, rank: int) -> Batches:
    """Return what a rank computes with in a pass; not in a graph, where seeds are no numbers."""
    dtype, found = getattr(torch, program.dtype), Batches()
    for seed in range(one.seed, one.seed + 7 * program.models, 7):
        numbers = torch.Generator().manual_seed(1000 * seed + rank)
        x = torch.randn(SAMPLES, WIDTH, generator=numbers, dtype=torch.float64)
        found.append((x.to(dtype), torch.tensor(10.0 ** (seed % 3 - 1), dtype=dtype)))
    return found


def loss_of(models: Sequence[Model], batches: Batches, one: Pass, rank: int, fails: int | None = None) -> torch.Tensor:
    """Return a rank's loss: the sum of those of all models, in the order of the rank."""
    terms = {n: _loss(models[n], batches[n], one.skips[rank], None if n else fails) for n in one.runs[rank]}
    return torch.stack([terms[n] for n in one.orders[rank]]).sum()


def _loss(
    model: Model, batch: tuple[torch.Tensor, torch.Tensor], skips: frozenset[int], fails: int | None
) -> torch.Tensor:
    x, factor = batch
    out: torch.Tensor = model(x, skips, fails)
    return (out - x.flip(1)).square().mean() * factor


Record = dict[str, Any]
"""Values by name: parameters after a step, or at last states and options."""


def leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Return the leaves of a tree by the text of their paths."""
    for path, leaf in tree_flatten_with_path(tree)[0]:
        name = "/".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
        # An option that Dynamo adds where a compiled step writes another one.
        if not name.endswith("/capturable"):
            yield name, leaf


# -- in one process ------------------------------------------------------------------------------------
def expected(program: Program) -> list[Record]:
    """Return the records of one process that has the batches of all ranks."""
    models, found = [make_model(program) for _ in range(program.models)], list[Record]()
    optimizers = [program.kind.make(groups_of(program, model)) for model in models]
    for number, segment in enumerate(program.segments):
        if number:
            states = [optimizer.state_dict() for optimizer in optimizers]
            optimizers = [program.kind.make(groups_of(program, model)) for model in models]
            for optimizer, state in zip(optimizers, states, strict=True):
                optimizer.load_state_dict(state)
        for step in segment.steps:
            for model, optimizer in zip(models, optimizers, strict=True):
                _prepare(program, step, model, optimizer)
            for one in step.passes:
                for model in models:
                    freeze(model, one.frozen)
                ranks = range(program.size)
                losses = [loss_of(models, batches_of(program, one, rank), one, rank) for rank in ranks]
                torch.stack(losses).mean().backward()
            if step.clip is not None:
                norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), *step.clip) for model in models]
                found.append({"norms": torch.stack(norms).double()})
            for optimizer in optimizers:
                optimizer.step()
            found.append(values(models))
    return [*found, dict(leaves([optimizer.state_dict() for optimizer in optimizers]))]


def _prepare(program: Program, step: Step, model: Model, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= step.rate
    model.zero_grad()
    if step.flat:
        flatten(program, model)


def values(models: Sequence[Model]) -> Record:
    """Return copies of all parameters."""
    return {f"{n}.{name}": p.detach().clone() for n, model in enumerate(models) for name, p in model.named_parameters()}


# -- on ranks ------------------------------------------------------------------------------------------
@dataclass
class Outcome:
    """The outcome of a program on one rank: records, whether the optimizer was refused, and what is wrong."""

    records: list[Record]
    refused: str = ""
    problem: str | None = None
    apart: bool = False


def run_batch(comm: un.Communicator, programs: Sequence[Program], folder: str, compiled: bool) -> list[Outcome]:
    """Run programs, until one has failed."""
    outcomes: list[Outcome] = []
    for program in programs:
        if compiled:
            # It compiles one function for a few kinds of arguments only.
            torch.compiler.reset()
        outcomes.append(Outcome([]))
        trainer = _Trainer(program, comm, Path(folder), outcomes[-1], compiled=compiled)
        try:
            trainer.run()
        except Exception:
            outcomes[-1].problem = traceback.format_exc(limit=-6)
        try:
            failed = any(comm.all_gather_object(outcomes[-1].problem is not None))
        except CommError as error:
            outcomes[-1].problem = f"{outcomes[-1].problem or ''}\nRanks do not meet after the program: {error}"
            outcomes[-1].apart = True
            break
        trainer.remove()
        if failed:
            break
    return outcomes


class _Trainer:
    def __init__(
        self, program: Program, comm: un.Communicator, folder: Path, outcome: Outcome, *, compiled: bool
    ) -> None:
        self.program, self.comm, self.folder, self.outcome = program, comm, folder, outcome
        self.compiled = compiled
        self.removes: list[Callable[[], None]] = []
        self.stage = 0
        self.models: list[Model] = []
        self.owners: list[Any] = []
        """For each model the averager, sharded optimizer or sharded model that averages gradients."""
        self.optimizers: list[Any] = []
        self.batches: list[Batches] = []
        """Of each pass of the running step."""

    def run(self) -> None:
        for number, segment in enumerate(self.program.segments):
            if not self._start(number, segment):
                return
            # A ShardedModel refuses to be compiled.
            compiles = self.compiled and self.stage != 3
            make_step = torch.compile(self._step, backend="eager") if compiles else self._step
            for step in segment.steps:
                make_step(step)
                self.outcome.records.append(self._whole())
        self.outcome.records.append(self._states())

    def remove(self) -> None:
        while self.removes:
            self.removes.pop()()

    # -- from segment to segment ---------------------------------------------------------------
    def _start(self, number: int, segment: Segment) -> bool:
        """Shard a new model, and load the state of the segment before. Return whether the optimizer is accepted."""
        before, parts_before = self.optimizers, self._parts()
        where = str(self.folder / f"{self.program.seed} {self.program.size} {number}")
        whole = self._whole() if number else {}
        if segment.files:
            un.checkpoint.save(where, {"models": parts_before, "optimizers": before}, self.comm)
        saved = [] if segment.files else [optimizer.state_dict() for optimizer in before]
        self.remove()
        self.stage = segment.stage
        self.models = [make_model(self.program) for _ in range(self.program.models)]
        self.owners, self.optimizers = [], []
        try:
            for model in self.models:
                self._shard(model, segment)
        except ValueError as error:
            self.outcome.refused = str(error)
            return False
        if segment.files:
            un.checkpoint.load(where, {"models": self._parts(), "optimizers": self.optimizers}, self.comm)
        elif saved:
            for optimizer, state in zip(self.optimizers, saved, strict=True):
                optimizer.load_state_dict(state)
            with self._full(), torch.no_grad():
                for n, model in enumerate(self.models):
                    for name, parameter in model.named_parameters():
                        parameter.copy_(whole[f"{n}.{name}"])
        return True

    def _parts(self) -> list[Any]:
        return list(self.owners if self.stage == 3 else self.models)

    @contextmanager
    def _full(self, **options: bool) -> Iterator[None]:
        """Whole parameters of all models."""
        with ExitStack() as stack:
            for owner in self.owners if self.stage == 3 else ():
                stack.enter_context(owner.full_parameters(**options))
            yield

    def _shard(self, model: Model, segment: Segment) -> None:
        program, comm = self.program, self.comm
        options = {**program.kind.options, "elementwise": program.elementwise}
        groups = groups_of(program, model)
        if self.stage == 3:
            self.owners.append(un.sharding.ShardedModel(model, comm, mesh=self._mesh()))
            self.removes.append(self.owners[-1].remove)
            self.optimizers.append(self.owners[-1].optimizer(program.kind.cls, groups, **options))
            return
        if self.stage == 1:
            cap = segment.cap
            owner = un.GradientAverager(
                model, comm, find_unused_parameters=True, bucket_cap_mb=cap, first_bucket_mb=cap
            )
            self.owners.append(owner)
            self.removes.append(owner.remove)
        else:
            options |= {"shard_gradients": True, "bucket_cap_mb": segment.cap}
        options["mesh"] = self._mesh()
        self.optimizers.append(un.sharding.ShardedOptimizer(program.kind.cls, groups, comm, **options))
        self.removes.append(self.optimizers[-1].remove)
        if self.stage == 2:
            self.owners.append(self.optimizers[-1])

    def _mesh(self) -> tuple[un.Communicator, un.Communicator] | None:
        """Return groups of two ranks by two, for every second program on four ranks."""
        if self.comm.size != 4 or self.program.seed % 2:
            return None
        shard = self.comm.split(self.comm.rank // 2)
        return self.comm.split(shard.rank), shard

    # -- steps ---------------------------------------------------------------------------------
    def _step(self, step: Step) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= step.rate
        self.batches = [batches_of(self.program, one, self.comm.rank) for one in step.passes]
        records = len(self.outcome.records)

        def whole(fails: bool) -> None:
            del self.outcome.records[records:]
            self._run(step, fails)

        # An averager repeats the pass that has failed; where gradients are sharded, the whole step is repeated.
        if self.stage == 1:
            whole(False)
        else:
            self._succeed(step, whole)

    def _run(self, step: Step, fails: bool) -> None:
        passes = partial(self._passes, step, fails)
        first, *others = self.optimizers
        if step.closure:
            first.step(passes)
        else:
            passes()
            first.step()
        for optimizer in others:
            optimizer.step()

    def _succeed(self, step: Step, attempt: Callable[[bool], None]) -> None:
        """Try until there is no error. At first some ranks raise, and others hear of it at any time."""
        fails = self.comm.rank in step.failing
        errors: list[Exception] = []
        while len(errors) < _ATTEMPTS:
            try:
                attempt(fails)
            except (PlannedError, CommError) as error:
                if not step.failing or not (fails or isinstance(error, CommError)):
                    raise
                errors.append(error)
                fails = False
            else:
                if fails:
                    raise AssertionError("no error of a pass that raises")
                return
        raise AssertionError(f"no success after {errors}")

    def _passes(self, step: Step, fails: bool) -> None:
        # A closure of ZeRO-3 runs inside the class's own step.
        with torch.enable_grad():
            for owner in self.models if step.zero == "model" else self.optimizers:
                owner.zero_grad()
            for model in self.models if step.flat else ():
                flatten(self.program, model)
            for number, one in enumerate(step.passes):
                for model in self.models:
                    freeze(model, one.frozen)
                if self.stage == 1 and number == step.fails[0]:
                    self._succeed(step, partial(self._pass, step, one, self.batches[number]))
                else:
                    self._pass(step, one, self.batches[number], fails and number == step.fails[0])
        if step.clip is not None:
            clippers = self.owners if self.stage == 3 else self.optimizers
            norms = [clipper.clip_grad_norm_(*step.clip) for clipper in clippers]
            self.outcome.records.append({"norms": torch.stack(norms).double()})

    def _pass(self, step: Step, one: Pass, batches: Batches, fails: bool) -> None:
        with ExitStack() as stack:
            for owner in () if one.sync else self.owners:
                stack.enter_context(owner.no_sync())
            loss_of(self.models, batches, one, self.comm.rank, step.fails[1] if fails else None).backward()

    # -- what is found -------------------------------------------------------------------------
    def _whole(self) -> Record:
        with self._full(writeback=False):
            return values(self.models)

    def _states(self) -> Record:
        """Return the whole state of the optimizer, made of the parts of all ranks."""
        found = dict(leaves([optimizer.state_dict() for optimizer in self.optimizers]))
        shards = {path: value for path, value in found.items() if isinstance(value, TensorShard)}
        ranks = self.comm.all_gather_object({path: (shard.start, shard.local) for path, shard in shards.items()})
        for path, shard in shards.items():
            # Without the copies of a mesh.
            distinct = {(part[0], len(part[1])): part for part in (rank[path] for rank in ranks)}
            parts = [distinct[key] for key in sorted(distinct)]
            found[path] = torch.cat([local for _, local in parts]).view(shard.shape)
        return found


# -- comparing -----------------------------------------------------------------------------------------
def failures(seeds: Iterable[int], backend: str, size: int, *, compiled: bool = False) -> Iterator[str]:
    """Run the programs of these seeds; one text for each that goes wrong."""
    seeds = iter(seeds)
    # A rank may still compile when another one is done.
    options = {"timeout": 200.0} if compiled else {}
    batch = 4 if compiled else _BATCH
    with tempfile.TemporaryDirectory() as folder:
        programs = [draw(seed, size) for seed in islice(seeds, batch)]
        while programs:
            by_rank = pool(backend, max(3, size), **options).run(run_batch, programs, folder, compiled, size=size)
            done = len(by_rank[0])
            for program, *outcomes in zip(programs, *by_rank, strict=False):
                problem = _problem(program, outcomes)
                if problem is not None:
                    yield _text(program, backend, problem, compiled)
            if any(outcomes[-1].apart for outcomes in by_rank):
                pool(backend, max(3, size), **options).close()
            programs = programs[done:]
            programs += [draw(seed, size) for seed in islice(seeds, batch - len(programs))]


def _problem(program: Program, outcomes: Sequence[Outcome]) -> str | None:
    problems = [f"rank {rank}: {o.problem}" for rank, o in enumerate(outcomes) if o.problem is not None]
    if problems:
        return "\n".join(problems)
    if any(outcome.refused for outcome in outcomes):
        right = program.kind.coupled and all(outcome.refused for outcome in outcomes)
        return None if right else f"refused by {[outcome.refused for outcome in outcomes]}"
    wanted = expected(program)
    for rank, outcome in enumerate(outcomes):
        for number, (found, right, first) in enumerate(zip(outcome.records, wanted, outcomes[0].records, strict=True)):
            wrong = _difference(found, right, _TOLERANCES[program.dtype])
            if wrong is not None:
                return f"rank {rank}, record {number}: {wrong}"
            if number < len(wanted) - 1 and any(_bits(found[name]) != _bits(first[name]) for name in found):
                return f"rank {rank}, record {number}: other bits than on rank 0"
    return None


def _difference(found: Record, wanted: Record, tolerance: float) -> str | None:
    if found.keys() != wanted.keys():
        return f"only in one of both: {sorted(found.keys() ^ wanted.keys())}"
    for name, value in wanted.items():
        own = found[name]
        if isinstance(value, torch.Tensor):
            finite = value[value.isfinite()]
            scale = max(1e-6, float(finite.abs().max()) if finite.numel() else 0.0)
            alike = own.shape == value.shape and own.dtype == value.dtype
            close = alike and torch.allclose(own, value, rtol=0, atol=tolerance * scale, equal_nan=True)
        elif isinstance(value, float):
            close = abs(own - value) <= tolerance * abs(value)
        else:
            close = own == value
        if not close:
            return f"{name} is {own} in place of {value}"
    return None


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _text(program: Program, backend: str, problem: str, compiled: bool) -> str:
    command = f"python tests/fuzz/sharded_fuzzing.py {program.seed} {backend} {program.size}{' compiled' * compiled}"
    return f"seed {program.seed}, {program.size} ranks on {backend}: {problem}\nTo run it again: {command}"


def main(seed: str, backend: str = "thread", size: str = "2", compiled: str = "") -> None:
    print(pformat(draw(int(seed), int(size)), width=120))
    print(next(failures([int(seed)], backend, int(size), compiled=bool(compiled)), "It passes."))


if __name__ == "__main__":
    main(*sys.argv[1:])
