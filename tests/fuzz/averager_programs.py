"""Random training programs for a gradient averager, as plain data drawn from one seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal, NamedTuple

__all__ = [
    "ROWS",
    "SAMPLES",
    "WIDTH",
    "Case",
    "Change",
    "Failure",
    "Hook",
    "Names",
    "Node",
    "Pass",
    "Place",
    "Step",
    "accumulated",
]

WIDTH, SAMPLES, ROWS = 3, 2, 5
"""Features of each value in a graph, samples of a batch, and rows of the embedding."""

Names = tuple[frozenset[str], ...]
"""For each rank the names of some parameters."""


@dataclass(frozen=True)
class Node:
    """One operation of a graph.

    Attributes:
        reads: Earlier values, whose sum is the input. Value 0 is the batch, value i the output of node i - 1.
        kind: "linear", "wide", "scale", "tanh", "complex", "embedding", "tied", "function" or "buffer".
        which: The layer, scale or buffer that it uses.
        checkpoint: How it is checkpointed: "", "reentrant" or "plain".
    """

    reads: tuple[int, ...]
    kind: str
    which: int = 0
    checkpoint: str = ""

    @property
    def parameters(self) -> frozenset[str]:
        """The names of the model's parameters that it uses."""
        if self.kind == "linear":
            weight = f"layers.{self.which}.weight"
            return frozenset({weight, f"layers.{self.which}.bias"} if self.which % 2 else {weight})
        if self.kind == "scale":
            return frozenset({f"scales.{self.which % 2}"})
        return frozenset(
            {"wide": ("up.weight", "down.weight"), "complex": ("turn",)}.get(self.kind, ())
            or (("table.weight",) if self.kind in ("embedding", "tied") else ())
        )


@dataclass(frozen=True)
class Place:
    """A point of a backward pass at which something of the user's runs.

    Attributes:
        kind: "value", a tensor hook on a value; "function", the backward of a custom function; or "early" or "late",
            a post-accumulate hook on a parameter, registered before or after the averager's.
        index: The value, or the node of the function.
        name: The parameter.
    """

    kind: Literal["value", "function", "early", "late"]
    index: int = 0
    name: str = ""


@dataclass(frozen=True)
class Hook:
    """A user's hook, which acts once in each pass.

    Attributes:
        action: "inner" runs a backward pass on `targets`; "caught" runs one that raises half-way, and goes on; "grad"
            asks for their gradients without accumulating; "halve" and "replace" change the parameter's `p.grad`.
        ranks: Those that have the hook.
    """

    place: Place
    action: str
    targets: tuple[str, ...] = ()
    ranks: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Pass:
    """One `backward()`.

    Attributes:
        seed: Of the batch.
        mode: "plain"; "penalty", of a loss with a gradient in it; "create_graph"; "roots", of two losses; or "inputs",
            for some parameters only.
        skips: For each rank, the nodes that only pass on their input.
        inputs: The parameters of mode "inputs".
        infinite: The rank whose loss is infinite.
        frozen: The parameters that are frozen in this pass, or None to leave them as they are.
    """

    seed: int
    mode: str = "plain"
    skips: tuple[frozenset[int], ...] = ()
    inputs: tuple[str, ...] = ()
    infinite: int | None = None
    frozen: Names | None = None


@dataclass(frozen=True)
class Failure:
    """The places where the first attempts of a pass go wrong, for each rank.

    Attributes:
        places: One for each rank, or None where nothing goes wrong by itself.
        retry: Whether ranks try until the pass succeeds; else all raise, and go on to the next step.
        times: How many attempts go wrong.
        how: "raise"; or a hook uses the gradient before it is averaged: "take" sets p.grad to None, "step" makes an
            optimizer's step, and sets p.grad to zero.
    """

    places: tuple[Place | None, ...]
    retry: bool = True
    times: int = 1
    how: str = "raise"


@dataclass(frozen=True)
class Change:
    """Something that is done to the model between passes.

    Attributes:
        kind: A name in `averager_changes.CHANGES`, or one in `ASIDES`.
        ranks: Those that do it.
    """

    kind: str
    ranks: frozenset[int]


@dataclass(frozen=True)
class Step:
    """Passes of which all but the last are made under `no_sync`.

    Attributes:
        zero: What is done to gradients at first: "none" and "zeros" call zero_grad; "own" makes them views of the
            user's memory, which is set to zero; "keep" does nothing.
        spared: Parameters that `zero` leaves out, such as those of another network.
        given: The parameters whose p.grad the user sets to numbers of the rank's own after that.
        weights: What each rank passes to `weight`, or None.
        weighed: The number of the pass before which it does.
        again: Whether ranks call `weight` once more before the last pass: an error, which ends the step.
        failure: Of the averaged pass.
        stumble: Of the first pass under `no_sync`.
        aside: What ranks do beside training before the first pass.
        mismatch: Whether ranks use different parameters although `find_unused_parameters` is off.
        ahead: What is made here of the next step's last pass: "", nothing; "graph", all: it runs through the graph of
            this step's last pass once more; "after" and "before", its forward, which runs after or before that of
            this step's last pass, and before both backward passes.
        reuse: Whether the step before has made the forward of the last pass.
        thread: Whether the averaged pass runs in a new thread.
        ranks: The ranks that still have data, or None for all. Only the last steps of a case, in `join`, have fewer.
        rate: The learning rate of the update at the end.
    """

    zero: str
    passes: tuple[Pass, ...]
    spared: frozenset[str] = frozenset()
    given: Names = ()
    weights: tuple[float, ...] | None = None
    weighed: int = 0
    again: bool = False
    failure: Failure | None = None
    stumble: Failure | None = None
    aside: Change | None = None
    mismatch: bool = False
    ahead: str = ""
    reuse: bool = False
    thread: bool = False
    ranks: frozenset[int] | None = None
    rate: float = 0.0

    @property
    def succeeds(self) -> bool:
        """True if its averaged pass ends without an error at last."""
        return not self.mismatch and not self.again and (self.failure is None or self.failure.retry)


@dataclass(frozen=True)
class Case:
    """A model, an averager's options, and what a program does with them.

    Attributes:
        dtype: Of real parameters.
        amp: "", "autocast", "scaler" or "autocast+scaler".
        compiled: Whether ranks run the model through `torch.compile`.
        wide: Width of the wide layer.
        frozen: Parameters that are frozen at first.
        memory: What the user's memory for gradients is: "flat", one tensor for each dtype; "offset", the same with
            gaps between gradients; "strided", every other element of it; or "apart", a tensor for each.
        parts: The sub-modules that have averagers of their own, beside one of the other parameters; for one averager
            there are none. With several averagers, ranks compute the nodes in different orders.
        listed: Whether the averagers of sub-modules are given lists of parameters.
        joined: How many steps at the end run in `join`.
        change: A change of the model at the end, which the next pass has to answer with an error on every rank.
        record: Whether hooks note each `p.grad` that they see: those registered before the averager, or after it.
    """

    seed: int
    size: int
    nodes: tuple[Node, ...]
    dtype: str = "float64"
    amp: str = ""
    compiled: bool = False
    wide: int = 4
    frozen: frozenset[str] = frozenset()
    memory: str = "flat"
    parts: tuple[str, ...] = ()
    listed: bool = False
    joined: int = 0
    record: frozenset[str] = frozenset()
    hooks: tuple[Hook, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    change: Change | None = None

    @property
    def find_unused_parameters(self) -> bool:
        return bool(self.options.get("find_unused_parameters"))

    @property
    def names(self) -> list[str]:
        """The parameters of the model."""
        layers = [name for which in range(3) for name in sorted(Node((), "linear", which).parameters)]
        kinds = {node.kind for node in self.nodes}
        more = [n for kind in ("wide", "complex", "embedding") if kind in kinds for n in Node((), kind).parameters]
        tied = ["table.weight"] if "tied" in kinds and "embedding" not in kinds else []
        return [*layers, "scales.0", "scales.1", *sorted(more), *tied]

    def ancestors(self) -> frozenset[int]:
        """The values that the result depends on."""
        found, stack = set[int](), [len(self.nodes)]
        while stack:
            value = stack.pop()
            if value not in found:
                found.add(value)
                stack += self.nodes[value - 1].reads if value else ()
        return frozenset(found)

    def places(self, one: Pass, rank: int) -> list[Place]:
        """The points that a rank's pass comes to, hooks' passes included."""
        values, skips = self.ancestors(), one.skips[rank]
        frozen = frozenset[str]() if one.frozen is None else one.frozen[rank]
        running = [(i, node) for i, node in enumerate(self.nodes) if i + 1 in values and i not in skips]
        used = {name for _, node in running for name in node.parameters} - frozen
        if one.mode == "inputs":
            found, used = [], used & set(one.inputs)
        else:
            found = [Place("value", value) for value in sorted(values)]
            found += [Place("function", i) for i, node in running if node.kind == "function"]
        return [*found, *(Place(kind, name=n) for n in self._closure(found, used, rank, frozen) for kind in _POST)]

    def _closure(self, found: list[Place], used: set[str], rank: int, frozen: frozenset[str]) -> list[str]:
        """The parameters that get a gradient, those of inner passes too."""
        while True:
            places = {*found, *(Place(kind, name=name) for name in used for kind in _POST)}
            hooks = [hook for hook in self.hooks if rank in hook.ranks and hook.place in places]
            more = used | {name for hook in hooks for name in accumulated(hook, frozen)}
            if more == used:
                return sorted(used)
            used = more

    def reached(self, one: Pass, rank: int) -> frozenset[str]:
        """The parameters that get a gradient in a rank's pass."""
        return frozenset(place.name for place in self.places(one, rank) if place.kind == "early")

    @property
    def last(self) -> Pass:
        """The pass after a change of the model."""
        return Pass(self.steps[-1].passes[-1].seed, skips=(frozenset[int](),) * self.size)

    def groups(self) -> list[frozenset[str]]:
        """The parameters of each averager."""
        groups = [frozenset(name for name in self.names if name.startswith(f"{part}.")) for part in self.parts]
        others = frozenset(self.names).difference(*groups)
        return [*groups, others] if others else groups

    def order(self, rank: int) -> list[int]:
        """The order in which a rank computes the nodes, on which that of their gradients depends."""
        numbers = list(range(len(self.nodes)))
        # What buffers hold depends on the order; with one averager nothing does.
        if not self.parts or any(node.kind == "buffer" for node in self.nodes):
            return numbers
        draw = Random(f"{self.seed}, order, {rank}")
        order = list[int]()
        while numbers:
            ready = [i for i in numbers if all(read == 0 or read - 1 in order for read in self.nodes[i].reads)]
            order.append(draw.choice(ready))
            numbers.remove(order[-1])
        return order

    def walk(self) -> Iterator[tuple[Step, Pass | None]]:
        """The steps, each with the last pass of the next one."""
        following = [step.passes[-1] for step in self.steps[1:]]
        return zip(self.steps, [*following, None], strict=True)

    def averaged(self) -> Iterator[Averaged]:
        """Gradients that ranks have in each step."""
        owed = [frozenset[str]()] * self.size
        for step in self.steps:
            ranks = sorted(range(self.size) if step.ranks is None else step.ranks)
            *alone, last = step.passes
            gone = [names - step.spared if step.zero == "none" else frozenset[str]() for names in owed]
            owed = [names - other for names, other in zip(owed, gone, strict=True)]
            for one in alone:
                owed = [names | self.reached(one, rank) for rank, names in enumerate(owed)]
            reached = [self.reached(last, rank) for rank in ranks]
            waiting = [owed[rank] - (last.frozen[rank] if last.frozen else frozenset()) for rank in ranks]
            brought = [names | more for names, more in zip(reached, waiting, strict=True)]
            yield Averaged(step, gone, reached, brought)
            if step.succeeds:
                owed = [names.difference(*brought) for names in owed]


class Averaged(NamedTuple):
    """Gradients that ranks have in a step.

    Attributes:
        gone: On each rank what waited, until the step has set it to None.
        reached: What the averaged pass reaches on each rank that has data.
        brought: The same with what waits there.
    """

    step: Step
    gone: list[frozenset[str]]
    reached: list[frozenset[str]]
    brought: list[frozenset[str]]


_POST: tuple[Literal["early"], Literal["late"]] = ("early", "late")


def accumulated(hook: Hook, frozen: frozenset[str]) -> list[str]:
    """The parameters to which a hook's pass adds."""
    targets = [name for name in hook.targets if name not in frozen]
    return {"inner": targets, "caught": targets[1:]}.get(hook.action, [])
