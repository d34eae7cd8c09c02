"""A generator of training programs: each seed gives one."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from averager_programs import Case, Change, Failure, Hook, Names, Node, Pass, Place, Step, accumulated

__all__ = ["draw"]

_CAPS = (0.00001, 0.00005, 0.0001, 0.0003, 1.0, None)
_ASIDES = ["functional", "evaluate", "copy", "load", "data"]
_REAL = ["linear"] * 5 + ["scale"] * 2 + ["tanh", "wide"]
_ALL = [*_REAL, "complex", "embedding", "embedding", "tied", "function", "function", "buffer"]
_PARTS = ("layers", "layers.0", "layers.1", "scales", "up", "table")
_RECORDS = (frozenset[str](), frozenset({"early"}), frozenset({"early", "late"}))


def draw(seed: int, size: int, *, compiled: bool = False, changes: tuple[str, ...] = ()) -> Case:
    """The program of a seed for this many ranks.

    Args:
        seed: Any integer.
        size: Number of ranks.
        compiled: Whether the model is compiled.
        changes: The changes of a model from which one may be drawn.
    """
    draw = Random(f"{seed}, {size}, {compiled}")
    amp = draw.choice(["autocast", "scaler", "autocast+scaler"]) if draw.random() < 0.12 else ""
    dtype = "float32" if amp or draw.random() < 0.1 else "float64"
    find_unused_parameters = draw.random() < 0.5
    change = Change(draw.choice(changes), _ranks(draw, size)) if changes and not amp and draw.random() < 0.12 else None
    surely = not find_unused_parameters or bool(amp) or change is not None or draw.random() < 0.8
    nodes = _nodes(draw, _REAL if amp or compiled else _ALL, surely=surely, checkpoints=not compiled)
    kinds = {node.kind for node in nodes}
    special = draw.random() if not (amp or compiled or change) else 1.0
    case = Case(
        seed,
        size,
        nodes,
        dtype=dtype,
        amp=amp,
        compiled=compiled,
        wide=draw.choice([1, 4, 17, 300]) if draw.random() < 0.95 else 25_000,
        memory=draw.choice(["flat", "flat", "offset", "strided", "apart"]),
        joined=draw.randint(1, 3) if special < (0.25 if "buffer" in kinds else 0.1) else 0,
        record=draw.choices(_RECORDS, [5, 3, 2])[0],
        options={
            "find_unused_parameters": find_unused_parameters,
            "average": "sum" if draw.random() < 0.15 else "mean",
            "bucket_cap_mb": draw.choice(_CAPS),
            "first_bucket_mb": draw.choice(_CAPS),
            "broadcast_buffers": "buffer" in kinds and draw.random() < 0.75,
        },
        change=change,
    )
    # Of a list of parameters an averager does not know which ones have sparse gradients.
    if 0.25 < special < 0.4 and "embedding" not in kinds:
        case = replace(case, nodes=_terms(draw, nodes), parts=_parts(draw, case), listed=draw.random() < 0.5)
        case.options["broadcast_buffers"] = False
    case = replace(case, frozen=_some(draw, case) if draw.random() < 0.25 else frozenset())
    hooks = tuple(_hook(draw, case) for _ in range(draw.choice([0, 0, 1, 1, 2, 3])))
    # What hooks see beside inner passes depends on the order of gradients, which is another one in a compiled model.
    if compiled and any(hook.action in ("inner", "caught") for hook in hooks):
        hooks = tuple(hook for hook in hooks if hook.action not in ("halve", "replace"))
    case = replace(case, hooks=hooks, record=frozenset() if compiled and hooks else case.record)
    while True:
        whole = replace(case, steps=_steps(draw, case))
        if _is_sound(whole):
            return whole


def _is_sound(case: Case) -> bool:
    """Return whether each averaged pass reaches a parameter where it must, and fails where it must."""
    # The weight of a failed step may be 0 on the ranks that still have data.
    if case.joined and not case.steps[-case.joined - 1].succeeds:
        return False
    for step, gone, reached, brought in case.averaged():
        # Torch calls no hook at all in a pass that comes to none of its inputs.
        if not all(reached) and (step.passes[-1].inputs or not case.find_unused_parameters):
            return False
        if not case.find_unused_parameters and (len(set(brought)) > 1) is not step.mismatch:
            return False
        # An averager cannot know that what waited was gone if the user has set another gradient since.
        if any(names & other for names, other in zip(gone, step.given, strict=False)):
            return False
    return True


def _ranks(draw: Random, size: int) -> frozenset[int]:
    """All ranks, or some of them."""
    return frozenset(range(size) if draw.random() < 0.5 else draw.sample(range(size), draw.randint(1, size - 1)))


def _nodes(draw: Random, kinds: list[str], *, surely: bool, checkpoints: bool) -> tuple[Node, ...]:
    """A random graph; where ranks must use a parameter, the last node is a layer that is never frozen or skipped."""
    chance = draw.choice([0.0, 0.0, 0.4]) if checkpoints else 0.0
    nodes = list[Node]()
    for i in range(draw.randint(2, 8)):
        # Mostly the value before, so that graphs are deep.
        reads = {i if draw.random() < 0.6 else draw.randint(0, i) for _ in range(draw.randint(1, 3))}
        if not checkpoints:
            # A compiled model gives zeros to what its result does not depend on.
            reads.add(i)
        how = draw.choice(["reentrant", "plain"]) if draw.random() < chance else ""
        node = Node(tuple(sorted(reads)), draw.choice(kinds), draw.randrange(3), how)
        if node.kind == "buffer":
            # To compute a buffer once more would change it. One that is written in place can be used once.
            written = any(other.kind == "buffer" and other.which == 3 for other in nodes)
            node = replace(node, which=draw.randrange(3 if written else 4), checkpoint="")
        nodes.append(node)
    if surely:
        nodes.append(Node((len(nodes),), "linear", 0))
    return tuple(nodes)


def _terms(draw: Random, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """The nodes as a sum of terms, which ranks compute in different orders."""
    *terms, last = nodes
    terms = [replace(node, reads=(0,)) if draw.random() < 0.5 else node for node in terms]
    return (*terms, replace(last, reads=tuple(range(1, len(nodes)))))


def _parts(draw: Random, case: Case) -> tuple[str, ...]:
    """Sub-modules that have no parameter in common."""
    chosen = list[str]()
    there = [part for part in _PARTS if any(name.startswith(f"{part}.") for name in case.names)]
    for part in draw.sample(there, draw.randint(1, 3)):
        if not any(part.startswith(other) or other.startswith(part) for other in chosen):
            chosen.append(part)
    return tuple(chosen)


def _is_sure(case: Case) -> bool:
    """Return whether every rank always uses layer 0."""
    return not case.find_unused_parameters or bool(case.amp) or case.change is not None


def _some(draw: Random, case: Case) -> frozenset[str]:
    """Parameters that may be frozen; ranks must always use layer 0."""
    return frozenset(n for n in case.names if draw.random() < 0.3 and not (n.startswith("layers.0")))


def _is_alike(case: Case) -> bool:
    """Return whether all ranks have the same passes, as all but an averager of a whole model needs them."""
    return not case.find_unused_parameters or bool(case.parts)


def _freeze(draw: Random, case: Case, other: frozenset[str]) -> Names:
    """Freeze some parameters, thaw all others."""
    names = other if other and draw.random() < 0.5 else _some(draw, case)
    # Where a parameter that was frozen at first is thawed, all ranks have to freeze the same ones.
    if _is_alike(case) or case.frozen or draw.random() < 0.5:
        return (names,) * case.size
    return tuple(_some(draw, case) for _ in range(case.size))


def _network(case: Case) -> frozenset[str]:
    """The parameters of one of two networks, if the model of the case is two of them."""
    draw = Random(f"{case.seed}, network")
    if case.amp or case.compiled or case.change or draw.random() < 0.7:
        return frozenset()
    names = {name.rpartition(".")[0] or name for name in case.names}
    chosen = [name for name in sorted(names) if draw.random() < 0.5]
    return frozenset(name for name in case.names if (name.rpartition(".")[0] or name) in chosen)


def _hook(draw: Random, case: Case) -> Hook:
    values = sorted(case.ancestors())
    if case.compiled:
        values = [0, len(case.nodes)]
    trainable = [name for name in case.names if name not in case.frozen]
    if draw.random() < 0.5:
        place = Place("value", draw.choice(values))
        action = draw.choice(["inner", "inner", "inner", "caught", "grad"])
    else:
        kind = draw.choice(["early", "late"] if not case.compiled else ["early"])
        place = Place("early" if kind == "early" else "late", name=draw.choice(trainable))
        action = draw.choice(["inner", "inner", "inner", "caught", "grad"])
        if kind == "early" and draw.random() < 0.25:
            action = draw.choice(["halve", "replace"])
    targets = tuple(draw.sample(case.names, draw.randint(1, 3)))
    return Hook(place, action, targets, frozenset(range(case.size)) if _is_alike(case) else _ranks(draw, case.size))


# -- steps ---------------------------------------------------------------------------------------------
def _steps(draw: Random, case: Case) -> tuple[Step, ...]:
    steps: list[Step] = []
    frozen: Names = (case.frozen,) * case.size
    weighted = case.options["average"] == "mean" and not case.parts and draw.random() < 0.3
    number = draw.randint(2, 4) if not case.compiled else 3
    counts = [draw.randint(0, case.joined) for _ in range(case.size)]
    counts[draw.randrange(case.size)] = case.joined
    for i in range(number + case.joined):
        before = steps[-1] if steps else None
        ranks = frozenset(rank for rank, count in enumerate(counts) if count > i - number) if i >= number else None
        step = _step(draw, case, i, frozen, before, ranks)
        if ranks is None:
            step = _troubled(draw, case, step)
        if weighted and draw.random() < 0.8:
            step = _weighted(draw, case, step, steps)
        chance = 0.5 if case.options["broadcast_buffers"] else 0.2
        if before is not None and ranks is None and draw.random() < chance:
            steps[-1], step = _ahead(draw, case, before, step)
        frozen = step.passes[-1].frozen or frozen
        steps.append(step)
    return tuple(steps)


def _step(
    draw: Random, case: Case, number: int, frozen: Names, before: Step | None, ranks: frozenset[int] | None
) -> Step:
    """A step in which nothing goes wrong; with some ranks only, it is one of `join`, in which nothing is frozen."""
    usable = not (before and any(one.infinite is not None for one in before.passes))
    zero = draw.choice(["none", "none", "zeros", "own", "keep"] if usable else ["none", "zeros", "own"])
    other = _network(case)
    waiting = _waiting(case, before)
    if waiting and usable and ranks is None and draw.random() < 0.5:
        # Thawed, and averaged although it may not be reached.
        zero, other, frozen = "keep", waiting, (frozenset[str](),) * case.size
    passes: list[Pass] = []
    for i in range(draw.choice([1, 1, 1, 1, 1, 1, 2, 2, 3])):
        if ranks is None and draw.random() < (0.25 if i or other else 0.1):
            frozen = _freeze(draw, case, other)
        passes.append(_pass(draw, case, 10 * number + i, frozen, other))
    passes[:-1] = [replace(one, infinite=None) for one in passes[:-1]]
    if draw.random() < 0.5:
        passes = _turned(case, passes)
    rate = 0.05 if case.dtype == "float64" and draw.random() < 0.5 else 0.0
    step = Step(zero, tuple(passes), ranks=ranks, rate=rate, thread=draw.random() < 0.05)
    if usable and draw.random() < 0.25:
        step = replace(step, spared=other or _some(draw, case))
    if draw.random() < 0.2:
        step = replace(step, given=tuple(_some(draw, case) for _ in range(case.size)))
    return step


def _troubled(draw: Random, case: Case, step: Step) -> Step:
    """The step with what ranks do beside training, and with what goes wrong in it."""
    first, last = step.passes[0], step.passes[-1]
    if draw.random() < 0.1:
        # What is recomputed in a functional call uses the model's own parameters.
        asides = _ASIDES[any(node.checkpoint for node in case.nodes) :]
        step = replace(step, aside=Change(draw.choice(asides), _ranks(draw, case.size)))
    if first is not last and draw.random() < 0.15:
        step = replace(step, stumble=_failure(draw, case, first))
    chance = draw.random()
    if chance < 0.25:
        failure = _failure(draw, case, last, used=chance < 0.08 and not (case.parts or case.compiled))
        if failure is not None and _is_noticed(case, last, failure) and draw.random() < 0.6:
            failure = replace(failure, retry=False, times=1)
        return replace(step, failure=failure)
    if chance < 0.32 and not case.find_unused_parameters and not case.parts:
        return _mismatched(draw, case, step)
    return step


def _waiting(case: Case, before: Step | None) -> frozenset[str]:
    """Return the parameters that the step before has accumulated, and frozen then."""
    if before is None:
        return frozenset()
    *alone, last = before.passes
    reached = frozenset[str]().union(*(case.reached(one, rank) for one in alone for rank in range(case.size)))
    return reached.intersection(*last.frozen or ())


def _is_noticed(case: Case, one: Pass, failure: Failure) -> bool:
    """Return whether the averager of each rank sees its pass fail, so that ranks may go on without another try."""
    if failure.how != "raise":
        return True
    # A value may be the output of the model, and raise before the averager sees the pass.
    sees = [p is not None and (p.kind != "value" or _is_sure(case)) for p in failure.places]
    return all(sees) and all(case.reached(one, rank) for rank in range(case.size))


def _weighted(draw: Random, case: Case, step: Step, before: list[Step]) -> Step:
    """The step with weights, one of which counts at least."""
    ranks = range(case.size) if step.ranks is None else step.ranks
    weights = tuple(draw.choice([0.0, 1.0, 2.0, 5.0]) for _ in range(case.size))
    if not sum(weights[rank] for rank in ranks):
        return step
    if before and not before[-1].succeeds:
        # The weight of a failed step holds until all that it counts for is gone.
        return replace(step, weights=weights, zero="none", spared=frozenset(), given=())
    *alone, _ = step.passes
    step = replace(step, weights=weights, weighed=draw.randint(0, len(alone)))
    # Without a gradient there is nothing that has a weight.
    counts = all(any(case.reached(one, rank) for one in alone[step.weighed :]) for rank in ranks)
    if counts and step.ranks is None and draw.random() < 0.2:
        return replace(step, again=True, failure=None, mismatch=False)
    return step


def _turned(case: Case, passes: list[Pass]) -> list[Pass]:
    """The passes in another order on each rank, if ranks then use the same parameters over all passes."""
    turned = [
        replace(one, skips=tuple(passes[(number + rank) % len(passes)].skips[rank] for rank in range(case.size)))
        for number, one in enumerate(passes)
    ]
    used = [frozenset.union(*(case.reached(one, rank) for one in turned)) for rank in range(case.size)]
    alike = case.compiled or case.parts or len(set(used)) > 1 or any(one.inputs for one in passes)
    return passes if alike else turned


def _pass(draw: Random, case: Case, seed: int, frozen: Names, other: frozenset[str]) -> Pass:
    kinds = {node.kind for node in case.nodes}
    reentrant = any(node.checkpoint == "reentrant" for node in case.nodes)
    sparse = "embedding" in kinds
    modes = ["plain"] * 4 + ["roots"]
    if not (reentrant or sparse or case.amp or case.compiled):
        modes += ["penalty", "create_graph"]
    one = Pass(seed, draw.choice(modes), _skips(draw, case, frozen, other), frozen=frozen)
    if "scaler" in case.amp and draw.random() < 0.2:
        one = replace(one, infinite=draw.randrange(case.size))
    hooked = any(hook.place.kind == "value" for hook in case.hooks)
    if not reentrant and not hooked and not case.compiled and draw.random() < 0.1:
        used = frozenset.union(*(case.reached(one, rank) for rank in range(case.size)))
        some = replace(one, mode="inputs", inputs=tuple(n for n in sorted(used) if draw.random() < 0.5))
        # Torch calls no hook at all in a pass that comes to none of its inputs.
        if all(case.reached(some, rank) for rank in range(case.size)):
            return some
    return one


def _skips(draw: Random, case: Case, frozen: Names, other: frozenset[str]) -> tuple[frozenset[int], ...]:
    sure = {len(case.nodes) - 1} if _is_sure(case) else set[int]()
    chance = 0.3 if case.compiled else draw.choice([0.0, 0.2, 0.5])

    def one() -> frozenset[int]:
        # A compiled model compiles for each, so there are two of them.
        numbers = Random(f"{case.seed}, {draw.randrange(2)}") if case.compiled else draw
        return frozenset(i for i in range(len(case.nodes)) if i not in sure and numbers.random() < chance)

    skips = [one()] * case.size if _is_alike(case) else [one() for _ in range(case.size)]
    if not any(case.reached(Pass(0, skips=tuple(skips)), rank) for rank in range(case.size)):
        skips = [frozenset()] * case.size if _is_alike(case) else [frozenset(), *skips[1:]]
    if other:
        # One of two networks alone.
        names = other if draw.random() < 0.5 else frozenset(case.names) - other
        without = frozenset(i for i, node in enumerate(case.nodes) if node.parameters & names)
        alone = tuple(skip | without for skip in skips)
        if all(case.reached(Pass(0, skips=alone, frozen=frozen), rank) for rank in range(case.size)):
            return alone
    return tuple(skips)


def _failure(draw: Random, case: Case, one: Pass, *, used: bool = False) -> Failure | None:
    """A failure of a pass: it raises, or a hook has used a gradient."""
    places: list[Place | None] = []
    failing = _ranks(draw, case.size)
    hooked = {hook.place for hook in case.hooks}
    for rank in range(case.size):
        found = [place for place in case.places(one, rank) if place.name not in case.frozen]
        if used:
            # A hook's own pass may make another gradient of what was taken.
            frozen = frozenset[str]() if one.frozen is None else one.frozen[rank]
            added = {name for hook in case.hooks if rank in hook.ranks for name in accumulated(hook, frozen)}
            found = [p for p in found if p.name and p not in hooked and p.name not in added]
        if case.compiled:
            found = [p for p in found if p.kind == "early" or p in (Place("value"), Place("value", len(case.nodes)))]
        places.append(draw.choice(found) if found and rank in failing else None)
    # A step changes the parameter, of which a graph that is not used up may have the old values.
    once = not case.hooks and not any(node.checkpoint for node in case.nodes)
    how = draw.choice(["take", "step"] if once else ["take"]) if used else "raise"
    return Failure(tuple(places), times=draw.choice([1, 1, 2]), how=how) if any(places) else None


def _mismatched(draw: Random, case: Case, step: Step) -> Step:
    """The step with one rank that skips more than others, if that makes a difference."""
    one = replace(step.passes[-1], mode="plain", inputs=())
    skips = list(one.skips)
    skips[draw.randrange(case.size)] |= {draw.randrange(len(case.nodes) - 1)}
    one = replace(one, skips=tuple(skips), infinite=None)
    if len({case.reached(one, rank) for rank in range(case.size)}) == 1:
        return step
    return replace(step, passes=(one,), stumble=None, mismatch=True)


def _ahead(draw: Random, case: Case, before: Step, step: Step) -> tuple[Step, Step]:
    """Both steps; in the first one a part of the second one's last pass is made, if that is possible."""
    if case.amp or case.compiled or before.failure or step.failure or before.reuse:
        return before, step
    if not (before.succeeds and step.succeeds):
        return before, step
    how = draw.choice(["graph", "after", "before"])
    # A forward that writes a buffer in place spoils the graph of another one, in plain torch too.
    if how != "graph" and any(node.kind == "buffer" and node.which == 3 for node in case.nodes):
        return before, step
    *alone, last = step.passes
    if how == "graph":
        alone, last = [], before.passes[-1]
    # What has been frozen since the forward gets no gradient; what has been thawed since is not in the graph.
    frozen = before.passes[-1].frozen or ()
    if not any(node.checkpoint for node in case.nodes):
        frozen = tuple(names | _some(draw, case) for names in frozen)
    last = replace(last, frozen=frozen[:1] * case.size if _is_alike(case) else frozen)
    if {last.mode, before.passes[-1].mode} & {"penalty", "create_graph"}:
        return before, step
    weighed = min(step.weighed, len(alone))
    step = replace(step, passes=(*alone, last), weighed=weighed, reuse=True, thread=False, aside=None)
    return replace(before, ahead=how, rate=0.0, thread=False), step
