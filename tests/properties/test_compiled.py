"""What is compiled does what the classes of Python do that it stands in for, in random programs of a few steps."""

from __future__ import annotations

import mmap
import os
import shutil
import sysconfig
import threading
from contextlib import nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import unisono as un
import unisono.quickly
import unisono.transports._mpi_again
from unisono.compiled import NO_EXTENSIONS, PLAIN, part

COMPILED = {name: part(name) for name in ("Doing", "Guarded", "Page", "Quickly", "Repeats")}
both = pytest.mark.skipif(None in COMPILED.values(), reason="nothing is compiled here, which another test looks at")
SINK: ContextVar[Any] = ContextVar("sink", default=None)


def test_the_extension_is_there_where_there_is_a_compiler() -> None:
    compiler = shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0])
    header = Path(sysconfig.get_path("include")) / "Python.h"
    possible = compiler and header.exists() and not sysconfig.get_config_var("Py_GIL_DISABLED")
    wanted = bool(possible) and not os.environ.get(NO_EXTENSIONS)
    assert {name for name, found in COMPILED.items() if found is not None} >= (set(COMPILED) if wanted else set())
    assert set(PLAIN) == set(COMPILED) - {"Page"}


# -- what is noted of a call, and when it may be made ----------------------------------------------
class Quick:
    names = frozenset({"all_reduce", "broadcast"})

    def __init__(self, log: list[Any]) -> None:
        self.log, self.outcome = log, None
        self.engine: Any = None

    def call(self, name: str, target: Any, source: Any, op: str, root: Any, deadline: float) -> Any:
        doing = self.engine.activity
        self.log.append((name, target, source, op, root, round(deadline - doing.since, 6), doing.inside, doing.now))
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


def engine_of(kinds: dict[str, Any], log: list[Any]) -> Any:
    """An engine of these parts, and no other."""

    class Doing(kinds["Doing"]):  # type: ignore[misc]  # whichever it is
        def enter(self, noted: Any) -> None:
            self.now, self.inside = noted, True
            log.append(("enter", noted))

        def leave(self) -> None:
            self.inside = False
            log.append(("leave", self.now))

    class Engine(kinds["Quickly"]):  # type: ignore[misc]  # whichever it is
        def __init__(self) -> None:
            self.activity, self.quick, self._sink, self._limit_s = Doing(), Quick(log), SINK, 7.0
            self.quick.engine = self
            self.activity.record = None
            self.owner, self.closed, self._broken, self._calls, self._pending = None, False, None, 0, 0

        def _patience(self, timeout: float) -> float:
            if timeout < 0:
                raise ValueError("negative")
            return timeout

        def _blamed(self, error: BaseException, noted: Any) -> BaseException:
            log.append(("blamed", type(error), noted))
            if isinstance(error, KeyError):
                told = un.errors.CommError("told")
                told.__cause__ = error
                return told
            return error

        def method(self, *given: Any) -> bool:
            done: bool = self.quickly(*given)
            return done

    return Engine()


CHANGES = st.one_of(
    st.tuples(st.just("owner"), st.sampled_from([None, -1, "here", "elsewhere"])),
    st.tuples(st.just("pending"), st.integers(0, 2)),
    st.tuples(st.just("broken"), st.sampled_from([None, "cause"])),
    st.tuples(st.just("closed"), st.booleans()),
    st.tuples(st.just("record"), st.sampled_from([None, "record"])),
    st.tuples(st.just("sink"), st.sampled_from([None, "sink"])),
    st.tuples(st.just("quick"), st.booleans()),
    st.tuples(st.just("keep"), st.text(max_size=3)),
)
QUICK_CALLS = st.tuples(
    st.just("call"),
    st.sampled_from(["all_reduce", "broadcast", "barrier"]),
    st.sampled_from(["sum", "", 3]),
    st.sampled_from([None, 0, 1, 300, True]),
    st.sampled_from([None, 2.5, 3, -1.0, "soon"]),
    st.sampled_from([True, False, ValueError, KeyError, KeyboardInterrupt]),
)
# After each change a call, and then all is as it was: few changes in a row let a call through.
STEPS = st.tuples(CHANGES, QUICK_CALLS, st.booleans())


AS_IT_WAS = [("owner", "here"), ("pending", 0), ("broken", None), ("closed", False), ("sink", None), ("quick", True)]


def played(kinds: dict[str, Any], rounds: list[tuple[Any, Any, bool]]) -> list[Any]:
    log: list[Any] = []
    engine = engine_of(kinds, log)
    quick, engine.owner = engine.quick, threading.get_ident()
    steps = [step for change, call, back in rounds for step in (change, call, *(AS_IT_WAS if back else ()))]
    for kind, *values in steps:
        if kind == "owner":
            here = threading.get_ident()
            engine.owner = {"here": here, "elsewhere": here + 1}.get(values[0], values[0])
        elif kind == "sink":
            SINK.set(values[0])
        elif kind == "quick":
            engine.quick = quick if values[0] else None
        elif kind == "record":
            engine.activity.record = values[0]
        elif kind == "keep":
            engine.activity.keep((values[0], None, "", None))
        elif kind == "call":
            name, op, root, timeout, outcome = values
            quick.outcome = outcome("told") if isinstance(outcome, type) else outcome
            try:
                log.append(engine.method(name, "target", "source", op, root, timeout))
            except BaseException as error:
                log.append((type(error), str(error), type(error.__cause__), error.__traceback__ is not None))
        else:
            setattr(engine, kind if kind == "closed" else f"_{kind}", values[0])
        doing = engine.activity
        log.append((engine._calls, doing.calls, doing.inside, doing.now, doing.latest, engine.owner))
    SINK.set(None)
    return log


@both
@given(rounds=st.lists(STEPS, min_size=5, max_size=30))
def test_calls_are_made_and_noted_alike(rounds: list[tuple[Any, Any, bool]]) -> None:
    assert played(COMPILED, rounds) == played(PLAIN, rounds)


@both
def test_only_whole_calls_are_taken() -> None:
    for kinds in (COMPILED, PLAIN):
        with pytest.raises(TypeError):
            engine_of(kinds, []).quickly("all_reduce")


# -- calls that are made again ---------------------------------------------------------------------
class Agreement:
    def __init__(self, log: list[Any]) -> None:
        self.log, self.counted, self.outcome = log, 0, True

    def reach(self, said: Any, deadline: float, count: int = 0) -> bool:
        self.log.append(("reach", said, deadline))
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


def repeats_of(kinds: dict[str, Any], log: list[Any], lock: Any) -> Any:
    class Comms(kinds["Guarded"]):  # type: ignore[misc]  # whichever it is
        turn = lock or nullcontext()

        def __init__(self) -> None:
            self.lock, self.broken = lock, None

    class Repeats(kinds["Repeats"]):  # type: ignore[misc]  # whichever it is
        def __init__(self) -> None:
            self.comms, self.agreement = Comms(), Agreement(log)
            super().__init__(self.agreement, None, self.comms)

        def _anew(self, *given: Any) -> bool:
            log.append(("anew", given[0], given[3:]))
            return False

        def _unlike(self, *given: Any) -> bool:
            log.append(("unlike", given[0], given[3:]))
            return True

        def _explained(self, error: BaseException) -> BaseException:
            told = un.errors.CommError("explained") if isinstance(error, KeyError) else error
            if told is not error:
                told.__cause__ = error
            return told

        def _divided(self, target: Any) -> bool:
            log.append("divided")
            return True

    return Repeats()


def changed(tensor: torch.Tensor, base: torch.Tensor, how: str) -> torch.Tensor:
    """The tensor, or another one in its place, after what may happen to a tensor of the first six of its base."""
    now = {
        "grown": lambda: base[:8],
        "moved": lambda: base[6:],
        "turned": lambda: base[:6].view(3, 2).t(),
        "shaped": lambda: base[:6].view(1, 6, 1),
        "strided": lambda: torch.as_strided(base, (1, 2, 3), (7, 3, 1)),
        "spread": lambda: torch.as_strided(base, (6,), (2,)),
        "of another kind": lambda: base[:6].view(torch.int32 if base.dtype is torch.float32 else torch.float64),
        "as it was": lambda: base[:6],
    }
    if how == "grad" and tensor.is_floating_point():
        tensor.requires_grad_(not tensor.requires_grad)
    elif how == "another":
        return base[:6]
    elif how in now and not tensor.requires_grad:
        tensor.data = now[how]()
    return tensor


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
HOW = ["grown", "moved", "turned", "shaped", "strided", "spread", "of another kind", "as it was", "grad", "another"]
HOW += ["longer list", "nothing"]
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


# -- sums in a page --------------------------------------------------------------------------------
@both
@given(data=st.data(), ranks=st.integers(1, 5), rounds=st.integers(1, 6))
def test_a_page_sums_what_all_ranks_give(data: st.DataObject, ranks: int, rounds: int) -> None:
    """Ranks come and look in any order, and nobody sees a sum before all have come to it."""
    memory = mmap.mmap(-1, 4096)
    words = [bytearray(24) for _ in range(ranks)]
    pages = [COMPILED["Page"](memory, words[rank], rank, ranks, 1) for rank in range(ranks)]
    given_words = [[data.draw(st.lists(st.integers(0, 2**64 - 1), min_size=3, max_size=3)) for _ in range(rounds)]]
    given_words += [[[(w * (rank + 3)) % 2**64 for w in one] for one in given_words[0]] for rank in range(1, ranks)]
    at, waiting = [0] * ranks, [False] * ranks
    while min(at) < rounds:
        rank = data.draw(st.sampled_from([r for r in range(ranks) if at[r] < rounds]))
        view = memoryview(words[rank]).cast("Q")
        if not waiting[rank]:
            view[0], view[1], view[2] = given_words[rank][at[rank]]
            pages[rank].start()
            waiting[rank] = True
        all_there = all(at[other] + waiting[other] > at[rank] for other in range(ranks))
        before = list(view)
        assert pages[rank].test() is all_there
        if all_there:
            sums = [sum(one[at[rank]][n] for one in given_words) % 2**64 for n in range(3)]
            assert (list(view), pages[rank].number) == (sums, at[rank] + 1)
            at[rank], waiting[rank] = at[rank] + 1, False
        else:
            assert list(view) == before


@both
@pytest.mark.parametrize("given_page", [(4096, 8, 0, 2), (128, 24, 0, 2), (4096, 24, 2, 2), (4096, 24, -1, 2)])
def test_a_page_that_cannot_be(given_page: tuple[int, int, int, int]) -> None:
    nbytes, words, rank, size = given_page
    with pytest.raises(ValueError, match="128 bytes"):
        COMPILED["Page"](memoryview(mmap.mmap(-1, 4096))[:nbytes], bytearray(words), rank, size, 1)


@both
def test_a_page_is_not_used_after_a_sum_that_was_given_up() -> None:
    memory = mmap.mmap(-1, 4096)
    pages = [COMPILED["Page"](memory, bytearray(24), rank, 2, 1) for rank in range(2)]
    pages[0].start()
    assert pages[0].test() is False
    with pytest.raises(RuntimeError, match="ended the wait"):
        pages[0].start()
    pages[1].start()
    assert (pages[1].test(), pages[0].test()) == (True, True)
    pages[0].start()
    assert [page.number for page in pages] == [2, 1]


@both
def test_a_page_without_memory_says_so() -> None:
    page = COMPILED["Page"].__new__(COMPILED["Page"])
    for action in (page.start, page.test):
        with pytest.raises(RuntimeError, match="without memory"):
            action()


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
