"""Random trainings with objects that remember a model, which is loaded, thawed, assigned and added to meanwhile.

Ranks train by themselves beside a periodic averager, an EMA and a NanGuard. What must come out is computed for all
ranks in one process, from lists of tensors: no object remembers anything there.

`python tests/fuzz/remembering_fuzzing.py SEED BACKEND SIZE` runs one seed, and prints its program.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pprint import pformat
from random import Random
from typing import Any

import torch
from torch import nn

import unisono as un
from unisono.errors import CommError, NotFiniteError
from unisono.gradients import DiLoCo, Gossip, LocalSGD, NanGuard
from unisono.testing import pool
from unisono.utils import EMA

__all__ = ["OUTER", "Maker", "Program", "draw", "failures"]

_BATCH = 20
_RATE, _DECAY = 0.1, 0.75
OUTER: dict[str, Any] = {"outer_lr": 0.5, "outer_momentum": 0.5}
_LOADS = ["load", "assign", "layers", "part", "broadcast"]
_CHANGES = ["thaw", "freeze", "replace", "data"]
_KINDS = ["LocalSGD", "DiLoCo", "Gossip", "none"]


# -- programs ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Step:
    """One step of training, on all ranks.

    Attributes:
        event: What is done to the model before: nothing, a load, or a change; or "add", of a layer.
        layer: The layer that a part, a change or an infinite gradient is of.
        bad: The rank that has an infinite gradient there, which every rank has to hear of, or None.
    """

    event: str
    layer: int
    bad: int | None


@dataclass(frozen=True)
class Program:
    """A model of some layers, an averager, and steps.

    Attributes:
        kind: Of the periodic averager: "LocalSGD", "DiLoCo", "Gossip", or "none".
        every: Steps from one exchange to the next.
        frozen: Layers that are frozen at first.
        parts: Whether each rank has a part of the EMA.
    """

    seed: int
    size: int
    kind: str
    every: int
    layers: int
    frozen: frozenset[int]
    parts: bool
    steps: tuple[Step, ...]


def draw(seed: int, size: int) -> Program:
    """Return the program of a seed for this many ranks."""
    draw = Random(f"{seed}, {size}")
    layers = draw.randint(1, 3)
    steps = []
    for _ in range(draw.randint(2, 9)):
        event = draw.choice(draw.choice([[""], _LOADS, _CHANGES]) if draw.random() < 0.95 else ["add"])
        bad = draw.randrange(size) if draw.random() < 0.15 else None
        steps.append(Step(event, draw.randrange(layers), bad))
    return Program(
        seed,
        size,
        kind=draw.choice(_KINDS),
        every=draw.randint(1, 3),
        layers=layers,
        frozen=frozenset(i for i in range(layers) if draw.random() < 0.4),
        parts=draw.random() < 0.5,
        steps=tuple(steps),
    )


def tensor(program: Program, *key: object) -> torch.Tensor:
    """Return the random numbers of a key."""
    numbers = torch.Generator().manual_seed(Random(f"{program.seed}, {key}").getrandbits(40))
    return torch.randn(2, 2, generator=numbers, dtype=torch.float64)


# -- in one process ------------------------------------------------------------------------------------
Values = list[torch.Tensor]


@dataclass
class Found:
    """What ranks hold: after each step the parameters, at last the EMA; and the step's number of each error."""

    values: list[Values] = field(default_factory=list)
    bad: list[tuple[int, int, str]] = field(default_factory=list)
    refused: int | None = None
    problem: str | None = None
    apart: bool = False


def expected(program: Program) -> list[Found]:
    """Return for each rank what it must find."""
    return _Process(program).run()


class _Process:
    """One process that has the values of all ranks."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.anchor = [tensor(program, "start", i) for i in range(program.layers)]
        self.momentum = [torch.zeros_like(t) for t in self.anchor]
        self.ranks = [[t.clone() for t in self.anchor] for _ in range(program.size)]
        self.averages: list[Values] = [[] for _ in self.ranks]
        self.frozen = set(program.frozen)
        self.replaced = set[int]()
        self.found = [Found() for _ in self.ranks]

    def run(self) -> list[Found]:
        program = self.program
        for number, step in enumerate(program.steps):
            self._change(number, step)
            self._learn(number, step)
            if (number + 1) % program.every == 0 and program.kind != "none":
                if step.event == "add" or (program.kind == "DiLoCo" and self.replaced):
                    for each in self.found:
                        each.refused = number
                    return self.found
                for i in range(program.layers):
                    self._exchange(i)
            for each, values in zip(self.found, self.ranks, strict=True):
                each.values.append([value.clone() for value in values])
            if step.event == "add":
                break
            self._average()
        # Parts of an average are of different ranks, whose values may differ.
        for each, average in zip(self.found, self.averages, strict=True):
            each.values += [average] if average and not program.parts else []
        return self.found

    def _learn(self, number: int, step: Step) -> None:
        for rank, values in enumerate(self.ranks):
            for i in set(range(self.program.layers)) - self.frozen:
                values[i] -= _RATE * tensor(self.program, "gradient", number, rank, i)
        if step.bad is not None and step.layer not in self.frozen:
            for each in self.found:
                each.bad.append((number, step.bad, f"{step.layer}.weight"))

    def _average(self) -> None:
        for average, values in zip(self.averages, self.ranks, strict=True):
            before = average or values
            average[:] = [_DECAY * b + (1 - _DECAY) * v for b, v in zip(before, values, strict=True)]

    def _change(self, number: int, step: Step) -> None:
        layer = step.layer
        if step.event in _LOADS:
            for i in [layer] if step.event == "part" else range(self.program.layers):
                self._load(
                    i, self.ranks[0][i] if step.event == "broadcast" else tensor(self.program, "load", number, i)
                )
        elif step.event == "thaw":
            self.frozen.discard(layer)
        elif step.event == "freeze":
            self.frozen.add(layer)
        elif step.event in ("replace", "data"):
            for rank, values in enumerate(self.ranks):
                values[layer] = tensor(self.program, "new", number, rank)
            if step.event == "replace":
                self.frozen.discard(layer)
                self.replaced.add(layer)

    def _load(self, i: int, value: torch.Tensor) -> None:
        value = value.clone()
        for values in self.ranks:
            values[i] = value.clone()
        if not torch.equal(self.anchor[i], value):
            self.momentum[i].zero_()
        self.anchor[i] = value
        self.replaced.discard(i)

    def _exchange(self, i: int) -> None:
        program, own = self.program, torch.stack([values[i] for values in self.ranks])
        after = own.mean(0).expand_as(own)
        if program.kind == "Gossip" and program.size > 3:
            after = (own + own.roll(1, 0) + own.roll(-1, 0)) / 3
        elif program.kind == "DiLoCo":
            change = self.anchor[i] - own.mean(0)
            self.momentum[i].mul_(OUTER["outer_momentum"]).add_(change)
            self.anchor[i] -= OUTER["outer_lr"] * (change + OUTER["outer_momentum"] * self.momentum[i])
            after = self.anchor[i].expand_as(own)
        for values, value in zip(self.ranks, after, strict=True):
            values[i] = value.clone()


# -- on ranks ------------------------------------------------------------------------------------------
Maker = Callable[..., Any]


MAKERS: dict[str, Maker] = {
    "LocalSGD": LocalSGD,
    "DiLoCo": partial(DiLoCo, **OUTER),
    "Gossip": Gossip,
    "EMA": EMA,
    "NanGuard": NanGuard,
}
"""What is made of a model, by name. A mutant takes the place of one."""


class _Trainer:
    def __init__(self, program: Program, comm: un.Communicator, make: dict[str, Maker], found: Found) -> None:
        self.program, self.comm, self.found = program, comm, found
        self.model = nn.Sequential(*(nn.Linear(2, 2, bias=False).double() for _ in range(program.layers)))
        self._fill(self.model, "start")
        for i in program.frozen:
            self.model[i].requires_grad_(False)
        self.ema = make["EMA"](self.model, _DECAY, comm if program.parts else None)
        self.guard = make["NanGuard"](self.model, comm)
        none = program.kind == "none"
        self.averager = None if none else make[program.kind](self.model, comm, every=program.every)

    @torch.no_grad()
    def _fill(self, model: nn.Module, *key: object) -> None:
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(tensor(self.program, *key, i))

    def close(self) -> None:
        self.guard.remove()
        if self.averager is not None:
            self.averager.close()

    def run(self) -> None:
        for number, step in enumerate(self.program.steps):
            getattr(self, f"_{step.event or 'nothing'}")(number, step.layer)
            self._learn(number, step)
            try:
                if self.averager is not None:
                    self.averager.step()
            except RuntimeError as error:
                if "was added, removed, resized, moved or replaced" not in str(error):
                    raise
                self.found.refused = number
                return
            self._update(step)
            if step.event == "add":
                break
        if not self.program.parts:
            del self.model[self.program.layers :]
            if self.ema.n_averaged:
                with self.ema.applied():
                    self.found.values.append(self._values())

    def _values(self) -> Values:
        return [p.detach().clone() for p in list(self.model.parameters())[: self.program.layers]]

    def _update(self, step: Step) -> None:
        self.found.values.append(self._values())
        try:
            self.ema.update()
        except RuntimeError:
            if step.event != "add":
                raise
        else:
            if step.event == "add":
                raise AssertionError("the average of a model with one more parameter is no error")

    def _learn(self, number: int, step: Step) -> None:
        """Make a pass whose gradients are known, and a step of SGD."""
        rank = self.comm.rank
        for i, layer in enumerate(list(self.model)[: self.program.layers]):
            if layer.weight.requires_grad:
                layer.weight.grad = None
                gradient = tensor(self.program, "gradient", number, rank, i)

                (layer.weight * gradient).sum().backward()
        for layer in list(self.model)[: self.program.layers]:
            if layer.weight.requires_grad:
                with torch.no_grad():
                    layer.weight -= _RATE * layer.weight.grad
        self._check(number, step)

    def _check(self, number: int, step: Step) -> None:
        weight = self.model[step.layer].weight
        if weight.requires_grad and step.bad is not None:
            self.guard.check()
            (weight * (float("inf") if self.comm.rank == step.bad else 1.0)).sum().backward()
        try:
            self.guard.check()
        except NotFiniteError as error:
            name = str(error).split("in the gradient of '")[1].split("'")[0]
            self.found.bad.append((number, -1 if error.peer is None else error.peer, name))

    # -- events --------------------------------------------------------------------------------
    def _nothing(self, number: int, layer: int) -> None:
        pass

    def _state(self, number: int) -> dict[str, torch.Tensor]:
        return {f"{i}.weight": tensor(self.program, "load", number, i) for i in range(self.program.layers)}

    def _load(self, number: int, layer: int) -> None:
        self.model.load_state_dict(self._state(number))

    def _assign(self, number: int, layer: int) -> None:
        frozen = [not p.requires_grad for p in self.model.parameters()]
        self.model.load_state_dict(self._state(number), assign=True)
        for parameter, is_frozen in zip(self.model.parameters(), frozen, strict=True):
            parameter.requires_grad_(not is_frozen)

    def _layers(self, number: int, layer: int) -> None:
        for i in range(self.program.layers):
            self._part(number, i)

    def _part(self, number: int, layer: int) -> None:
        self.model[layer].load_state_dict({"weight": tensor(self.program, "load", number, layer)})

    def _broadcast(self, number: int, layer: int) -> None:
        un.broadcast_parameters(self.model, self.comm)

    def _thaw(self, number: int, layer: int) -> None:
        self.model[layer].requires_grad_(True)

    def _freeze(self, number: int, layer: int) -> None:
        self.model[layer].requires_grad_(False)

    def _replace(self, number: int, layer: int) -> None:
        self.model[layer].weight = nn.Parameter(tensor(self.program, "new", number, self.comm.rank))

    def _data(self, number: int, layer: int) -> None:
        self.model[layer].weight.data = tensor(self.program, "new", number, self.comm.rank)

    def _add(self, number: int, layer: int) -> None:
        self.model.append(nn.Linear(2, 2, bias=False).double())


def run_batch(comm: un.Communicator, programs: Sequence[Program], mutant: dict[str, Maker]) -> list[Found]:
    """Run programs, until one has failed."""
    found: list[Found] = []
    for program in programs:
        found.append(Found())
        try:
            trainer = _Trainer(program, comm, MAKERS | mutant, found[-1])
            trainer.run()
            trainer.close()
        except Exception:
            found[-1].problem = traceback.format_exc(limit=-6)
        try:
            failed = any(comm.all_gather_object(found[-1].problem is not None))
        except CommError as error:
            found[-1].problem = f"{found[-1].problem or ''}\nRanks do not meet after the program: {error}"
            found[-1].apart = failed = True
        if failed:
            break
    return found


# -- comparing -----------------------------------------------------------------------------------------
def failures(seeds: Iterable[int], backend: str, size: int, *, mutant: dict[str, Maker] | None = None) -> Iterator[str]:
    """Run the programs of these seeds; one text for each that goes wrong."""
    programs = [draw(seed, size) for seed in seeds]
    while programs:
        by_rank = pool(backend, max(3, size)).run(run_batch, programs[:_BATCH], mutant or {}, size=size)
        done = len(by_rank[0])
        for program, *found in zip(programs, *by_rank, strict=False):
            problem = _problem(program, found)
            if problem is not None:
                command = f"python tests/fuzz/remembering_fuzzing.py {program.seed} {backend} {size}"
                yield f"seed {program.seed}, {size} ranks on {backend}: {problem}\nTo run it again: {command}"
        if any(found[-1].apart for found in by_rank):
            pool(backend, max(3, size)).close()
        programs = programs[done:]


def _problem(program: Program, ranks: Sequence[Found]) -> str | None:
    for rank, (found, wanted) in enumerate(zip(ranks, expected(program), strict=True)):
        if found.problem is not None:
            return f"rank {rank}: {found.problem}"
        if found.bad != wanted.bad:
            return f"rank {rank}: the guard says {found.bad} in place of {wanted.bad}"
        if found.refused != wanted.refused or len(found.values) != len(wanted.values):
            return f"rank {rank} is refused in step {found.refused} in place of {wanted.refused}"
        for number, (one, other) in enumerate(zip(found.values, wanted.values, strict=True)):
            for i, (own, right) in enumerate(zip(one, other, strict=True)):
                if not torch.allclose(own, right, rtol=0, atol=1e-8):
                    return f"rank {rank}, step {number}: layer {i} is {own.tolist()} in place of {right.tolist()}"
    return None


def main(seed: str, backend: str = "thread", size: str = "2") -> None:
    print(pformat(draw(int(seed), int(size)), width=120))
    print(next(failures([int(seed)], backend, int(size)), "It passes."))


if __name__ == "__main__":
    main(*sys.argv[1:])
