"""Calls of MPI that the compiled class makes again are those that the class of Python does, in random programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiled_kit import COMPILED, PLAIN, both
from hypothesis import given
from hypothesis import strategies as st
from repeats_kit import HOW, changed, repeats_of

import unisono as un

REPEATED_CALLS = [
    ("broadcast", 0, None, 0),
    ("broadcast", 0, None, 1),
    ("scatter", 0, None, 1),
    ("scatter", 1, (0, 1), True),
    ("scatter", 1, (0, 1), 1),
    ("all_gather_single", 2, 0, None),
    ("all_gather_single", 2, 1, None),
    ("barrier", None, None, None),
]
AGAIN = st.lists(
    st.one_of(
        st.tuples(st.just("change"), st.integers(0, 2), st.sampled_from(HOW)),
        st.tuples(st.just("counted"), st.integers(0, 1)),
        st.tuples(st.just("reached"), st.sampled_from([False, TimeoutError("late")])),
        st.tuples(st.just("moving"), st.sampled_from([KeyError("MPI"), KeyboardInterrupt()])),
        st.just(("forget_failures",)),
    ),
    min_size=1,
    max_size=12,
)


class Repeated:
    """A program of such steps, and what comes of it."""

    def __init__(self, kinds: dict[str, Any], steps: list[tuple[Any, ...]], lock: Any) -> None:
        self.log: list[Any] = []
        self.repeats, self.moves = repeats_of(kinds, self.log, lock), None
        self.bases = [torch.zeros(12), torch.zeros(12, dtype=torch.int64), torch.zeros(12)]
        self.tensors = [base[:6] for base in self.bases]
        self.lists: dict[tuple[int, ...], list[torch.Tensor]] = {}
        self.longer = 0
        for divisor, call in enumerate(REPEATED_CALLS[1:]):
            # No rank is True: such a call is never remembered.
            if call[3] is not True:
                self.remember(*call, divisor % 2)
        for kind, *values in steps:
            getattr(self, kind)(*values)
            for call in REPEATED_CALLS:
                self.call(*call)

    def begin(self, *given: Any) -> None:
        lock = self.repeats.comms.lock
        self.log.append(("begin", given, self.repeats.comms.deadline, lock and lock.held))
        if self.moves is not None:
            raise self.moves

    def meant(self, which: Any) -> Any:
        if not isinstance(which, tuple):
            return None if which is None else self.tensors[which]
        found = self.lists.setdefault(which, [])
        found[:] = [self.tensors[n] for n in which] + [self.tensors[0]] * self.longer
        return found

    def change(self, which: int, how: str) -> None:
        if how == "longer list":
            self.longer += 1
        self.tensors[which] = changed(self.tensors[which], self.bases[which], how)

    def counted(self, count: int) -> None:
        self.repeats.agreement.counted = count

    def reached(self, outcome: Any) -> None:
        self.repeats.agreement.outcome = outcome

    def forget_failures(self) -> None:
        self.counted(0), self.reached(True), self.moving(None)

    def moving(self, error: Any) -> None:
        self.moves = error

    def remember(self, name: str, target: Any, source: Any, root: Any, divisor: int) -> None:
        begin = None if target is None else self.begin
        call = name, self.meant(target), self.meant(source), "sum", root
        self.repeats.remember(*call, (bytes(24), bytes(24)), begin, (name, "buffer"), divisor)

    def call(self, name: str, target: Any, source: Any, root: Any) -> None:
        try:
            self.log.append(self.repeats.call(name, self.meant(target), self.meant(source), "sum", root, 5.0))
        except BaseException as error:
            self.log.append((type(error), str(error), type(error.__cause__)))
        self.log.append(self.repeats.comms.deadline)


class Lock:
    """Tells how often it is held."""

    def __init__(self) -> None:
        self.held = 0

    def acquire(self) -> None:
        self.held += 1

    def release(self) -> None:
        self.held -= 1

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


@both
@given(steps=AGAIN, locked=st.booleans())
def test_calls_are_repeated_alike(steps: list[tuple[Any, ...]], locked: bool) -> None:
    locks = [Lock() if locked else None for _ in range(2)]
    found, expected = (Repeated(kinds, steps, lock).log for kinds, lock in zip((COMPILED, PLAIN), locks, strict=True))
    assert found == expected
    assert not any(lock and lock.held for lock in locks)


@both
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("which", range(3))
def test_each_change_is_seen_alike(how: str, which: int) -> None:
    steps = [("change", which, how)]
    assert Repeated(COMPILED, steps, None).log == Repeated(PLAIN, steps, None).log


@both
def test_a_broken_communicator_makes_no_call_again() -> None:
    log: list[Any] = []
    repeats, tensor = repeats_of(COMPILED, log, None), torch.zeros(2)
    repeats.remember("broadcast", tensor, None, "", 0, (bytes(24), bytes(24)), log.append, ("moved",), 0)
    assert repeats.call("broadcast", tensor, None, "", 0, 5.0) is True
    repeats.comms.broken = un.errors.CommError("broken")
    with pytest.raises(un.errors.CommError, match="broken"):
        repeats.call("broadcast", tensor, None, "", 0, 5.0)
    assert log.count("moved") == 1


@both
def test_an_interrupt_in_the_look_at_a_tensor_comes_through() -> None:
    class Interrupted(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise KeyboardInterrupt

    for kinds in (COMPILED, PLAIN):
        log: list[Any] = []
        repeats, tensor = repeats_of(kinds, log, None), torch.zeros(2)
        repeats.remember("broadcast", tensor, None, "", 0, (bytes(24), bytes(24)), log.append, ("moved",), 0)
        with Interrupted(), pytest.raises(KeyboardInterrupt):
            repeats.call("broadcast", tensor, None, "", 0, 5.0)
        assert not log


@both
def test_many_tensors_are_remembered() -> None:
    log: list[Any] = []
    repeats, tensors = repeats_of(COMPILED, log, None), [torch.zeros(2) for _ in range(1000)]
    for tensor in tensors:
        repeats.remember("broadcast", tensor, None, "", 0, (bytes(24), bytes(24)), log.append, ("moved",), 0)
    for tensor in tensors:
        repeats.call("broadcast", tensor, None, "", 0, 5.0)
    assert log.count("moved") > 950
