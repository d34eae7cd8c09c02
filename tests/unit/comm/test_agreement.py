"""`agree`: values that ranks should have in common are compared with the next collective, and differences are named."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pairwise import short

import unisono as un
from unisono.comm.agreement import parts_of
from unisono.core.transport import Transport
from unisono.core.types import Message, Work
from unisono.errors import CommError, MismatchError
from unisono.testing import pool, run_ranks
from unisono.wrappers.base import Wrapper

BACKENDS = ("thread", "shm", "tcp", "gloo", "sim")
AUTO = [*product(BACKENDS, ["auto"])]


@dataclass
class Settings:
    lr: float
    layers: list[int]


def same(comm: un.Communicator) -> list[float]:
    """The same values in other orders; carried by each kind of call."""
    model = torch.nn.Linear(3, 2)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.5)
    values: dict[str, Any] = {"a": 1, "b": [math.nan, (2, None)], "t": torch.arange(6).view(2, 3).t()}
    if comm.rank:
        values = {**dict(reversed(values.items())), "t": values["t"].contiguous()}
    x = torch.ones(3)
    comm.agree(values, "values")
    comm.agree({3, 1, 2}, "set")
    comm.all_reduce(x)
    comm.agree(Settings(0.1, [1, 2]), "dataclass")
    comm.all_reduce(x, algorithm="ring", async_op=True).wait()
    comm.agree(model, "model")
    other = comm.dup()
    other.all_reduce(x)
    other.agree(np.arange(3), "array")
    comm.all_gather_single(torch.empty(3 * comm.size), torch.ones(3))
    comm.agree("flushed", "text")
    comm.flush_agreements()
    other.close()
    return x.tolist()


# What `check` changes is above the transport: it is tried where calls are native, and where they are not.
@short(
    "backend, check", product(BACKENDS, ["auto", "full", "off"]), [*AUTO, *product(["thread", "shm"], ["full", "off"])]
)
def test_equal_values_pass(backend: str, check: str) -> None:
    assert pool(backend, 3, check=check).run(same) == [[27.0] * 3] * 3


def number(comm: un.Communicator) -> None:
    comm.agree({"lr": [0.1, 0.2 + (comm.rank == 2)]}, "settings")
    comm.all_reduce(torch.ones(3))


def tensor(comm: un.Communicator) -> None:
    weight = torch.zeros(5)
    comm.agree({"w": weight.index_fill(0, torch.tensor([3]), float(comm.rank == 2))}, "state")
    # What comes later does not count.
    weight.fill_(comm.rank)
    comm.all_reduce(torch.ones(3), async_op=True).wait()


def key(comm: un.Communicator) -> None:
    comm.agree({"a" if comm.rank < 2 else "b": 1}, "keys")
    comm.dup().barrier()


def length(comm: un.Communicator) -> None:
    comm.agree({"w": [1, 2], "v": [5] * (2 + comm.rank // 2)}, "lists")
    comm.flush_agreements()


def kind(comm: un.Communicator) -> None:
    comm.agree([3] if comm.rank < 2 else 3, "kinds")
    comm.flush_agreements()


def zero(comm: un.Communicator) -> None:
    comm.agree(-0.0 if comm.rank == 2 else 0.0, "zero")
    comm.all_reduce(torch.ones(3), algorithm="ring")


def dtype(comm: un.Communicator) -> None:
    comm.agree(torch.ones(2, dtype=torch.float32 if comm.rank < 2 else torch.float64), "dtype")
    comm.flush_agreements()


def missing(comm: un.Communicator) -> None:
    if comm.rank < 2:
        comm.agree(1, "settings")
    comm.all_reduce(torch.ones(3))


def fewer(comm: un.Communicator) -> None:
    comm.agree(1, "first")
    if comm.rank < 2:
        comm.agree(2, "second")
    comm.barrier()


def names(comm: un.Communicator) -> None:
    comm.agree(1, f"of {comm.rank // 2}")
    comm.barrier()


WRONG: dict[Callable[[un.Communicator], None], str] = {
    number: r"ranks differ in 'settings', at \['lr'\]\[1\]: ranks 0, 1: 0.2; rank 2: 1.2 \(at test_agreement",
    tensor: r"ranks differ in 'state', at \['w'\]: ranks 0, 1: float32 tensor of shape \(5,\), digest \w+; rank 2: ",
    key: r"ranks differ in 'keys', at \['a'\]: ranks 0, 1: 1; rank 2: not there",
    length: r"ranks differ in 'lists', at \['v'\]\[2\]: ranks 0, 1: not there; rank 2: 5",
    kind: "ranks differ in 'kinds': ranks 0, 1: list of 1; rank 2: 3",
    zero: "ranks differ in 'zero': ranks 0, 1: 0.0; rank 2: -0.0",
    dtype: r"ranks differ in 'dtype': ranks 0, 1: float32 tensor of shape \(2,\), .*; rank 2: float64",
    missing: r"ranks 0, 1: agree\('settings'\) at test_agreement.*; rank 2: all_reduce",
    fewer: "ranks agree on different things: ranks 0, 1: 'second' at .*; rank 2: nothing more",
    names: "ranks agree on different things: ranks 0, 1: 'of 0' at .*; rank 2: 'of 1'",
}


def outcome(comm: un.Communicator, program: Callable[[un.Communicator], None]) -> str:
    own = comm.dup()
    try:
        program(own)
    except MismatchError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("program", WRONG, ids=lambda program: program.__name__)
@pytest.mark.parametrize("backend", BACKENDS)
def test_differences_are_named_on_every_rank(backend: str, program: Callable[[un.Communicator], None]) -> None:
    for text in pool(backend, 3, check="auto").run(outcome, program):
        assert re.search(WRONG[program], text), text


def unchecked(comm: un.Communicator) -> None:
    comm.agree(comm.rank // 2, "settings")
    comm.all_reduce(torch.ones(3))
    comm.flush_agreements()


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_checks_a_flush_compares(backend: str) -> None:
    with pytest.raises(MismatchError, match="ranks differ in 'settings': ranks 0, 1: 0; rank 2: 1"):
        un.launch(unchecked, 3, backend, check="off")


def flushed(comm: un.Communicator) -> list[float]:
    comm.agree(comm.rank // 2, "settings")
    with pytest.raises(MismatchError, match="ranks differ in 'settings': ranks 0, 1: 0; rank 2: 1"):
        comm.flush_agreements()
    x = torch.ones(2)
    comm.all_reduce(x)
    comm.flush_agreements()
    return x.tolist()


@short("backend, check", product(BACKENDS, ["auto", "off"]), [*AUTO, *product(["thread", "shm"], ["off"])])
def test_a_flush_breaks_nothing(backend: str, check: str) -> None:
    assert pool(backend, 3, check=check).run(flushed) == [[3.0, 3.0]] * 3


def at_the_end(comm: un.Communicator) -> None:
    comm.agree(comm.rank, "end")


def test_close_compares_what_waits() -> None:
    ended = un.launch(at_the_end, 2, "shm", on_failure="continue")
    errors = [error for error in ended if error is not None]
    assert len(errors) == 1
    assert "ranks differ in 'end'" in str(errors[0])


def test_values_that_cannot_be_compared_are_refused() -> None:
    def program(comm: un.Communicator) -> None:
        itself: list[Any] = []
        itself.append(itself)
        with pytest.raises(TypeError, match=r"\['f'\]\[0\] is a function, which ranks cannot compare"):
            comm.agree({"f": [lambda: 0]}, "function")
        with pytest.raises(ValueError, match=r"\[0\] is a container that is in itself"):
            comm.agree(itself, "list")
        with pytest.raises(TypeError, match="name must be a str, not int"):
            comm.agree(1, 1)  # type: ignore[arg-type]
        comm.barrier()

    un.launch(program, 2, "thread")


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)


def shown(value: Any) -> str:
    """Text that is equal for equal values: what `repr` shows, but for the order of dicts."""
    if isinstance(value, dict):
        return f"{{{', '.join(sorted(f'{key!r}: {shown(entry)}' for key, entry in value.items()))}}}"
    return f"[{', '.join(map(shown, value))}]" if isinstance(value, list) else repr(value)


@given(VALUES, VALUES)
def test_digests_differ_where_values_do(one: Any, other: Any) -> None:
    equal = sorted(parts_of(one)) == sorted(parts_of(other))
    assert equal == (shown(one) == shown(other))


@given(st.dictionaries(st.text(max_size=2), VALUES))
def test_order_of_a_dict_does_not_matter(value: dict[str, Any]) -> None:
    turned = dict(reversed(value.items()))
    assert sorted(parts_of(value)) == sorted(parts_of(turned))


class Nesting(Wrapper):
    """Makes a call inside of another one, as a signal handler may.

    Attributes:
        nested: The call of each rank that makes one.
    """

    nested: ClassVar[dict[int, Callable[[], None]]] = {}

    def wrap_child(self, inner: Transport) -> Nesting:
        return Nesting(inner)

    def post(self, batch: Sequence[Message]) -> Work:
        action = self.nested.pop(self.rank, None)
        if action is not None:
            action()
        return super().post(batch)


def test_values_outlive_a_call_that_is_refused() -> None:
    def program(comm: un.Communicator) -> None:
        def refused() -> None:
            comm.agree(comm.rank, "the rank")
            with pytest.raises(CommError, match="was called inside"):
                comm.all_reduce(torch.ones(1))

        Nesting.nested[comm.rank] = refused
        comm.all_reduce(torch.ones(2))
        comm.barrier()

    for error in run_ranks(program, 2, "thread", wrap=Nesting, on_failure="continue"):
        assert isinstance(error, MismatchError)
        assert "the rank" in str(error)


def test_refused_call_leaves_nothing_to_compare() -> None:
    def program(comm: un.Communicator) -> float:
        tensor = torch.ones(1)
        if comm.rank == 0:
            with pytest.raises(ValueError, match="nonesuch"):
                comm.all_reduce(tensor, scale=0.5, algorithm="nonesuch")
        comm.all_reduce(tensor)
        return tensor.item()

    assert un.launch(program, 2, "thread") == [2.0, 2.0]


def test_nested_call_leaves_no_scale_to_compare() -> None:
    def program(comm: un.Communicator) -> list[float]:
        def refused() -> None:
            with pytest.raises(CommError, match="was called inside"):
                comm.all_reduce(torch.ones(1), scale=0.5)

        if comm.rank == 0:
            Nesting.nested[0] = refused
        tensor = torch.ones(2)
        comm.all_reduce(tensor)
        comm.barrier()
        return tensor.tolist()

    assert run_ranks(program, 2, "thread", wrap=Nesting) == [[2.0, 2.0]] * 2
