"""A generator of training programs: each seed gives one."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from averager_programs import Case, Change, Failure, Hook, Node, Pass, Place, Step

__all__ = ["draw"]

_CAPS = (0.00001, 0.00005, 0.0001, 0.0003, 1.0, None)
_ASIDES = ["functional", "evaluate", "copy", "load", "data"]
_REAL = ["linear"] * 5 + ["scale"] * 2 + ["tanh", "wide"]
_ALL = [*_REAL, "complex", "embedding", "embedding", "tied", "function", "function"]


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
    case = Case(
        seed,
        size,
        _nodes(draw, _REAL if amp or compiled else _ALL, surely=surely, checkpoints=not compiled),
        dtype=dtype,
        amp=amp,
        compiled=compiled,
        wide=draw.choice([1, 4, 17, 300]) if draw.random() < 0.95 else 25_000,
        record=draw.random() < 0.6,
        options={
            "find_unused_parameters": find_unused_parameters,
            "average": "sum" if draw.random() < 0.15 else "mean",
            "bucket_cap_mb": draw.choice(_CAPS),
            "first_bucket_mb": draw.choice(_CAPS),
        },
        change=change,
    )
    case = replace(case, frozen=_frozen(draw, case) if draw.random() < 0.25 else frozenset())
    hooks = tuple(_hook(draw, case) for _ in range(draw.choice([0, 0, 1, 1, 2, 3])))
    # What hooks see beside inner passes depends on the order of gradients, which is another one in a compiled model.
    if compiled and any(hook.action in ("inner", "caught") for hook in hooks):
        hooks = tuple(hook for hook in hooks if hook.action not in ("halve", "replace"))
    case = replace(case, hooks=hooks)
    return replace(case, steps=_steps(draw, case), record=case.record and not (compiled and hooks))


def _ranks(draw: Random, size: int) -> frozenset[int]:
    """All ranks, or some of them."""
    return frozenset(range(size) if draw.random() < 0.5 else draw.sample(range(size), draw.randint(1, size - 1)))


def _nodes(draw: Random, kinds: list[str], *, surely: bool, checkpoints: bool) -> tuple[Node, ...]:
    """A random graph; where ranks must use a parameter, the last node is a layer that is never frozen or skipped."""
    chance = draw.choice([0.0, 0.0, 0.4]) if checkpoints else 0.0
    nodes = []
    for i in range(draw.randint(2, 8)):
        # Mostly the value before, so that graphs are deep.
        reads = {i if draw.random() < 0.6 else draw.randint(0, i) for _ in range(draw.randint(1, 3))}
        if not checkpoints:
            # A compiled model gives zeros to what its result does not depend on.
            reads.add(i)
        how = draw.choice(["reentrant", "plain"]) if draw.random() < chance else ""
        nodes.append(Node(tuple(sorted(reads)), draw.choice(kinds), draw.randrange(3), how))
    if surely:
        nodes.append(Node((len(nodes),), "linear", 0))
    return tuple(nodes)


def _is_sure(case: Case) -> bool:
    """Return whether every rank always uses layer 0."""
    return not case.find_unused_parameters or bool(case.amp) or case.change is not None


def _frozen(draw: Random, case: Case) -> frozenset[str]:
    return frozenset(n for n in case.names if draw.random() < 0.3 and not (n.startswith("layers.0")))


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
    return Hook(
        place, action, targets, _ranks(draw, case.size) if case.find_unused_parameters else frozenset(range(case.size))
    )


# -- steps ---------------------------------------------------------------------------------------------
def _steps(draw: Random, case: Case) -> tuple[Step, ...]:
    steps: list[Step] = []
    frozen, weighted = case.frozen, case.options["average"] == "mean" and draw.random() < 0.3
    for number in range(draw.randint(2, 4) if not case.compiled else 3):
        before = steps[-1] if steps else None
        step = _step(draw, case, number, frozen, before)
        frozen = frozen if step.frozen is None else step.frozen
        if weighted and draw.random() < 0.8:
            weights = tuple(draw.choice([0.0, 1.0, 2.0, 5.0]) for _ in range(case.size))
            step = replace(step, weights=weights if sum(weights) else None)
        if step.failure is None and not step.mismatch and before is not None and draw.random() < 0.1:
            reused = _reused(case, before, step)
            if reused is not None:
                steps[-1], step = reused
        steps.append(step)
    return tuple(steps)


def _step(draw: Random, case: Case, number: int, frozen: frozenset[str], before: Step | None) -> Step:
    kept = case.options["average"] == "mean" and not (before and any(one.infinite is not None for one in before.passes))
    zero = draw.choice(["none", "none", "zeros", "keep"] if kept else ["none", "zeros"])
    thaw = None
    if draw.random() < 0.15:
        thaw, zero = _frozen(draw, case), draw.choice(["none", "zeros"])
        frozen = thaw
    if before is not None and not before.succeeds and zero == "zeros":
        # What a failed step accumulated counts as used until it is set to None.
        zero = "none"
    passes = [_pass(draw, case, 10 * number, frozen)]
    while draw.random() < 0.25:
        passes.insert(0, _pass(draw, case, 10 * number + len(passes), frozen))
    passes[:-1] = [replace(one, infinite=None) for one in passes[:-1]]
    if draw.random() < 0.5:
        passes = _turned(case, passes, frozen)
    rate = 0.05 if case.dtype == "float64" and draw.random() < 0.5 else 0.0
    step = Step(zero, tuple(passes), thaw, rate=rate, thread=draw.random() < 0.05)
    if draw.random() < 0.1:
        # What is recomputed in a functional call uses the model's own parameters.
        asides = _ASIDES[any(node.checkpoint for node in case.nodes) :]
        step = replace(step, aside=Change(draw.choice(asides), _ranks(draw, case.size)))
    if len(passes) > 1 and draw.random() < 0.15:
        step = replace(step, stumble=_failure(draw, case, passes[0], frozen))
    chance = draw.random()
    if chance < 0.2:
        failure = _failure(draw, case, passes[-1], frozen)
        # What a failed step accumulated counts in the next one.
        unequal = not case.find_unused_parameters and any(len(set(one.skips)) > 1 for one in passes)
        if failure is not None and all(failure.places) and not unequal and draw.random() < 0.6:
            failure = replace(failure, retry=False, times=1)
        return replace(step, failure=failure)
    if chance < 0.27 and not case.find_unused_parameters:
        return _mismatched(draw, case, step, frozen, before)
    return step


def _turned(case: Case, passes: list[Pass], frozen: frozenset[str]) -> list[Pass]:
    """The passes in another order on each rank, if ranks then use the same parameters over all passes."""
    turned = [
        replace(one, skips=tuple(passes[(number + rank) % len(passes)].skips[rank] for rank in range(case.size)))
        for number, one in enumerate(passes)
    ]
    used = [frozenset.union(*(case.reached(one, rank, frozen) for one in turned)) for rank in range(case.size)]
    return passes if case.compiled or len(set(used)) > 1 or any(one.inputs for one in passes) else turned


def _pass(draw: Random, case: Case, seed: int, frozen: frozenset[str]) -> Pass:
    skips = _skips(draw, case)
    kinds = {node.kind for node in case.nodes}
    reentrant = any(node.checkpoint == "reentrant" for node in case.nodes)
    sparse = "embedding" in kinds
    modes = ["plain"] * 4 + ["roots"]
    if not (reentrant or sparse or case.amp or case.compiled):
        modes += ["penalty", "create_graph"]
    one = Pass(seed, draw.choice(modes), skips)
    if "scaler" in case.amp and draw.random() < 0.2:
        one = replace(one, infinite=draw.randrange(case.size))
    hooked = any(hook.place.kind == "value" for hook in case.hooks)
    if not reentrant and not hooked and not case.compiled and draw.random() < 0.1:
        used = [case.reached(one, rank, frozen) for rank in range(case.size)]
        inputs = frozenset(name for name in case.names if draw.random() < 0.5)
        if all(inputs & names for names in used) and (case.find_unused_parameters or len(set(used)) == 1):
            some = replace(one, mode="inputs", inputs=tuple(sorted(inputs & frozenset.union(*used))))
            # Torch calls no hook at all in a pass that comes to none of its inputs.
            if all(case.reached(some, rank, frozen) for rank in range(case.size)):
                return some
    return one


def _skips(draw: Random, case: Case) -> tuple[frozenset[int], ...]:
    sure = {len(case.nodes) - 1} if _is_sure(case) else set[int]()
    chance = 0.3 if case.compiled else draw.choice([0.0, 0.2, 0.5])

    def one() -> frozenset[int]:
        # A compiled model compiles for each, so there are two of them.
        numbers = Random(f"{case.seed}, {draw.randrange(2)}") if case.compiled else draw
        return frozenset(i for i in range(len(case.nodes)) if i not in sure and numbers.random() < chance)

    skips = [one() for _ in range(case.size)] if case.find_unused_parameters else [one()] * case.size
    if not any(case.reached(Pass(0, skips=tuple(skips)), rank, frozenset()) for rank in range(case.size)):
        skips[0] = frozenset()
    return tuple(skips)


def _failure(draw: Random, case: Case, one: Pass, frozen: frozenset[str]) -> Failure | None:
    places: list[Place | None] = []
    failing = _ranks(draw, case.size)
    for rank in range(case.size):
        found = [p for p in case.places(one, rank, frozen) if p.name not in case.frozen]
        if case.compiled:
            found = [p for p in found if p.kind == "early" or p in (Place("value"), Place("value", len(case.nodes)))]
        places.append(draw.choice(found) if found and rank in failing else None)
    return Failure(tuple(places), times=draw.choice([1, 1, 2])) if any(places) else None


def _mismatched(draw: Random, case: Case, step: Step, frozen: frozenset[str], before: Step | None) -> Step:
    """The step with one rank that skips more than others, if that makes a difference."""
    one = replace(step.passes[-1], mode="plain", inputs=())
    skips = list(one.skips)
    skips[draw.randrange(case.size)] |= {draw.randrange(len(case.nodes) - 1)}
    one = replace(one, skips=tuple(skips), infinite=None)
    if len({case.reached(one, rank, frozen) for rank in range(case.size)}) == 1 or (before and not before.succeeds):
        return step
    return replace(step, passes=(one,), mismatch=True)


def _reused(case: Case, before: Step, step: Step) -> tuple[Step, Step] | None:
    """Both steps, of which the second runs through the first one's graph."""
    one = before.passes[-1]
    if before.failure or before.mismatch or before.reuse or one.mode in ("penalty", "create_graph") or case.amp:
        return None
    if step.frozen is not None or case.compiled or (len(set(one.skips)) > 1 and not case.find_unused_parameters):
        return None
    again = replace(step, passes=(one,), reuse=True, thread=False, aside=None)
    return replace(before, retain=True, rate=0.0, thread=False), again
