"""Hooks in C note gradients of the pass that they were told of, and ask about all others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiled_kit import COMPILED, both

from unisono.gradients.backward_pass import current_pass


def adding(kind: Any, again: list[int]) -> Any:
    """A class that only notes what comes again."""

    class Adding(kind):
        def add(self, slot: int) -> None:
            again.append(slot)

    return Adding


class Noting:
    """Three parameters with hooks; the first one to ask says of which pass it need not be asked again."""

    def __init__(self, *, notes: bool = True) -> None:
        self.parameters = [torch.nn.Parameter(torch.full((2,), float(n + 1))) for n in range(3)]
        places = tuple(torch.zeros(2) for _ in self.parameters)
        self.asked: list[int] = []
        self.full = 0
        self.notes = notes
        self.again: list[int] = []
        self.handles: list[Any] = []
        self.filling = adding(COMPILED["Filling"], self.again)(tuple(self.parameters), places, 0, True, False)
        self.running = COMPILED["Running"](self.fill)
        self.hooks = [COMPILED["Hook"](self.asks(index), self.running) for index in range(3)]
        for slot, (parameter, hook) in enumerate(zip(self.parameters, self.hooks, strict=True)):
            self.handles.append(parameter.register_post_accumulate_grad_hook(hook))
            hook.place(self.filling, slot)

    def fill(self) -> None:
        self.full += 1

    def asks(self, index: int) -> Any:
        def ask(parameter: torch.Tensor) -> None:
            assert parameter is self.parameters[index]
            self.asked.append(index)
            if self.notes:
                self.running.number = current_pass()
            if not self.filling.started:
                self.filling.arrived(index)

        return ask

    def backward(self) -> list[int]:
        """Who asked, in a pass to which all parameters are of use."""
        self.asked = []
        first, second, third = self.parameters
        (((first * 1.0).exp() * second).exp() * third).sum().backward()
        return self.asked


@both
def test_only_the_first_hook_of_a_pass_asks() -> None:
    noting = Noting()
    assert len(noting.backward()) == 1
    assert (noting.full, list(noting.filling.inside)) == (1, [1, 1, 1])
    assert [p.grad for p in noting.parameters] == [None] * 3

    noting.filling.forget()
    assert len(noting.backward()) == 1
    assert noting.full == 2


@both
def test_all_ask_where_none_may_note() -> None:
    noting = Noting(notes=False)
    assert sorted(noting.backward()) == [0, 1, 2]
    assert noting.full == 0


@both
def test_what_comes_again_and_what_comes_late_asks() -> None:
    noting = Noting()
    noting.backward()
    assert sorted(noting.backward()) == sorted(noting.again) == [0, 1, 2]
    noting.filling.forget()
    noting.filling.started = True
    assert sorted(noting.backward()) == [0, 1, 2]
    assert not noting.filling.late


@both
def test_a_hook_without_a_place_asks() -> None:
    noting = Noting()
    last = noting.backward()[0]
    noting.filling.forget()
    for hook in noting.hooks:
        hook.place(None, 0)
    assert sorted(noting.backward()) == [0, 1, 2]
    noting.filling.forget()
    others = [index for index in range(3) if index != last]
    noting.hooks[others[0]].place(noting.filling, others[0])
    assert sorted(noting.backward()) == sorted([last, others[1]])


@both
def test_outside_of_a_pass_a_hook_asks() -> None:
    noting = Noting()
    noting.hooks[1](noting.parameters[1])
    assert (noting.asked, noting.running.number) == ([1], -1)


@both
def test_an_error_on_the_way_is_raised_by_the_pass() -> None:
    def breaks() -> None:
        raise KeyError("full")

    noting = Noting()
    noting.running = COMPILED["Running"](breaks)
    for slot, (parameter, handle) in enumerate(zip(noting.parameters, noting.handles, strict=True)):
        handle.remove()
        hook = COMPILED["Hook"](noting.asks(slot), noting.running)
        hook.place(noting.filling, slot)
        parameter.register_post_accumulate_grad_hook(hook)
    with pytest.raises(KeyError, match="full"):
        noting.backward()


@both
def test_places_that_cannot_be() -> None:
    noting = Noting()
    for place in [(noting.filling, 3), (noting.filling, -1), (object(), 0)]:
        with pytest.raises(ValueError, match="a slot of a Filling"):
            noting.hooks[0].place(*place)
    with pytest.raises(TypeError):
        COMPILED["Hook"](print, object())
