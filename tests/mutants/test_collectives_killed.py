"""Every function in `mutants/collectives/` is wrong, and drawn inputs find it in its smallest form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from loading import load, mutants

import unisono as un
from unisono.testing import pool, reference, strategies

MUTANTS = mutants("collectives")
# A wrong order, a wrong rank, a wrong element.
QUICK = {"sum_drops_the_remainder", "broadcast_ignores_its_root", "gather_starts_with_itself"}
EXAMPLES = 200

Run = Callable[[un.Communicator, torch.Tensor, int], torch.Tensor]


def expected(collective: str, inputs: list[torch.Tensor], rank: int, root: int) -> torch.Tensor:
    size = len(inputs)
    if collective in ("all_reduce", "reduce_scatter"):
        total = reference.reduced(inputs, "sum").value
        return total if collective == "all_reduce" else total.tensor_split(size)[rank]
    if collective == "maximum":
        return reference.reduced(inputs, "max").value
    if collective == "broadcast":
        return inputs[root]
    if collective == "scan":
        return reference.reduced(inputs[: rank + 1], "sum").value
    if collective == "all_to_all":
        return torch.cat([given.tensor_split(size)[rank] for given in inputs])
    return torch.cat(inputs)


def check(run: Run, collective: str, inputs: list[torch.Tensor], root: int) -> None:
    def program(comm: un.Communicator) -> torch.Tensor:
        return run(comm, inputs[comm.rank].clone(), root)

    found = pool("sim").run(program, size=len(inputs))
    for rank, result in enumerate(found):
        wanted = expected(collective, inputs, rank, root)
        complaint = reference.permuted(wanted).complaint(result)
        assert not complaint, f"rank {rank} of {len(inputs)}: {complaint}"


def smallest(run: Run, collective: str) -> tuple[int, list[torch.Tensor]]:
    """Return the number of examples until the first failure, and the inputs that it shrank to."""
    tried: list[list[torch.Tensor]] = []
    failed: list[int] = []

    @settings(
        max_examples=EXAMPLES, database=None, deadline=None, derandomize=True, phases=[Phase.generate, Phase.shrink]
    )
    @given(inputs=strategies.inputs(), root=st.integers(0, 3))
    def test(inputs: list[torch.Tensor], root: int) -> None:
        tried.append(inputs)
        try:
            check(run, collective, inputs, root % len(inputs))
        except BaseException:
            failed.append(len(tried))
            raise

    with pytest.raises((AssertionError, un.CommError)):
        test()
    return failed[0], tried[failed[-1] - 1]


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=() if path.stem in QUICK else pytest.mark.soak) for path in MUTANTS],
    ids=lambda path: path.stem,
)
def test_drawn_inputs_kill_mutant(path: Path) -> None:
    mutant = load(path)
    examples, inputs = smallest(mutant.run, mutant.COLLECTIVE)
    print(f"{path.stem}: example {examples}, shrunk to {len(inputs)} ranks, {len(inputs[0])} elements")
    assert examples <= EXAMPLES
    assert len(inputs) <= 2
    assert len(inputs[0]) <= 3


@settings(max_examples=max(10, settings.default.max_examples // 10), database=None)
@given(inputs=strategies.inputs(), root=st.integers(0, 3))
def test_correct_collectives_live(inputs: list[torch.Tensor], root: int) -> None:
    def all_reduce(comm: un.Communicator, tensor: torch.Tensor, root: int) -> torch.Tensor:
        comm.all_reduce(tensor)
        return tensor

    def broadcast(comm: un.Communicator, tensor: torch.Tensor, root: int) -> torch.Tensor:
        comm.broadcast(tensor, root)
        return tensor

    check(all_reduce, "all_reduce", inputs, root % len(inputs))
    check(broadcast, "broadcast", inputs, root % len(inputs))


def test_mutants_exist() -> None:
    assert len(MUTANTS) >= 15
