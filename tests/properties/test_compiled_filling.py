"""What has come to a bucket is noted alike in Python and in C; and C leaves to torch what it cannot copy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compiled_kit import COMPILED, PLAIN, both
from hypothesis import example, given, settings
from hypothesis import strategies as st

KINDS = pytest.mark.parametrize("kinds", [PLAIN, COMPILED], ids=["Python", "C"])


def noting(kind: Any) -> Any:
    """A class that notes what is left to torch; gradients in it are what is noted, and have no parameters."""

    class Noting(kind):
        def __init__(self, lengths: list[int], chunk: int) -> None:
            owners = tuple(SimpleNamespace(nbytes=n, grad=None) for n in lengths)
            super().__init__(owners, owners, chunk, False, False)
            self.log: list[Any] = []

        def take_by_torch(self, slots: list[int]) -> None:
            self.log.append(("take", slots))
            for slot in slots:
                self.inside[slot] = True

        def add(self, slot: int) -> None:
            self.log.append(("add", slot))
            if slot == 1:
                raise KeyError("an error on the way")

    return Noting


def played(kind: Any, lengths: list[int], chunk: int, steps: list[tuple[str, int]]) -> list[Any]:
    filling = noting(kind)(lengths, chunk)
    log = filling.log
    for name, slot in steps:
        try:
            match name:
                case "arrived":
                    log.append(filling.arrived(slot))
                case "take":
                    filling.take([slot % len(lengths)])
                case "started":
                    filling.started = True
                case "forget":
                    filling.forget()
        except (IndexError, KeyError) as error:
            log.append(repr(error))
        log.append((filling.missing, filling.started, filling.late, bytes(filling.came), bytes(filling.inside)))
    return log


@both
@settings(max_examples=5 * settings.default.max_examples)
@example(lengths=[10, 20], chunk=1, steps=[("arrived", 0), ("arrived", 1), ("forget", 0), ("arrived", 1)])
@given(
    lengths=st.lists(st.sampled_from([0, 10, 20, 30, 50]), min_size=1, max_size=6),
    chunk=st.sampled_from([0, 1, 40, 90, 10_000]),
    steps=st.lists(
        st.tuples(st.sampled_from(["arrived"] * 6 + ["take", "started", "forget"]), st.integers(0, 6)),
        max_size=25,
    ),
)
def test_both_note_the_same(lengths: list[int], chunk: int, steps: list[tuple[str, int]]) -> None:
    log = played(COMPILED["Filling"], lengths, chunk, steps)
    assert log == played(PLAIN["Filling"], lengths, chunk, steps)


def leaving(kind: Any, left: list[int]) -> Any:
    """A class that only notes what it leaves to torch."""

    class Leaving(kind):
        def take_by_torch(self, slots: list[int]) -> None:
            left.extend(slots)

    return Leaving


@both
@pytest.mark.parametrize(
    "gradient",
    [torch.ones(3, dtype=torch.float64), torch.ones(4), torch.ones(1, 3), torch.ones(3, device="meta"), torch.ones(())],
)
def test_what_is_no_gradient_of_a_place_is_left_to_torch(gradient: torch.Tensor) -> None:
    """Torch keeps most of these from being a parameter's gradient, but not all, and not for ever."""
    owner, place = SimpleNamespace(grad=gradient, nbytes=12), torch.zeros(3)
    left: list[int] = []
    filling = leaving(COMPILED["Filling"], left)((owner,), (place,), 0, True, False)
    filling.arrived(0)

    assert (left, list(filling.inside), owner.grad is gradient, place.tolist()) == ([0], [0], True, [0.0] * 3)


@both
def test_a_gradient_that_is_in_its_place_already_stays_there() -> None:
    place = torch.arange(40_000.0)
    owner = SimpleNamespace(grad=place, nbytes=place.nbytes)
    COMPILED["Filling"]((owner,), (place,), 0, True, True).arrived(0)
    assert owner.grad is None
    assert torch.equal(place, torch.arange(40_000.0))


@both
@KINDS
def test_slots_and_places_that_are_not_there(kinds: Any) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    filling = kinds["Filling"]((parameter,), (torch.zeros(3),), 100, True, False)
    for slot in (1, -1):
        with pytest.raises(IndexError, match="no such slot"):
            filling.arrived(slot)
    with pytest.raises(ValueError, match="one place"):
        kinds["Filling"]((parameter,), (), 100, True, False)


@both
def test_what_c_refuses() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    kind = COMPILED["Filling"]
    filling = kind((parameter,), (torch.zeros(3),), 100, True, False)
    with pytest.raises(IndexError, match="no such slot"):
        filling.take([1])
    with pytest.raises(TypeError, match="integer"):
        filling.take(["a"])
    with pytest.raises(TypeError, match="a list of slots"):
        filling.take((0,))
    with pytest.raises(RuntimeError, match="made once"):
        filling.__init__((parameter,), (torch.zeros(3),), 100, True, False)
    with pytest.raises(BufferError):
        filling.came.append(1)
    empty = kind.__new__(kind)
    for use in (lambda: empty.arrived(0), lambda: empty.take([0]), empty.forget, lambda: empty.came):
        with pytest.raises(RuntimeError, match="before __init__"):
            use()
