"""What is compiled of an engine does what the classes of Python do, in random programs of a few steps."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from time import monotonic
from typing import Any

import pytest
import torch
from compiled_kit import COMPILED, PLAIN, both
from hypothesis import given
from hypothesis import strategies as st

import unisono as un
from unisono.activity import Activity

SINK: ContextVar[Any] = ContextVar("sink", default=None)


class Quick:
    names = frozenset({"all_reduce", "broadcast", "reduce"})

    def __init__(self, log: list[Any]) -> None:
        self.log, self.outcome = log, None
        self.engine: Any = None

    def call(self, name: str, target: Any, source: Any, op: str, root: Any, deadline: float) -> Any:
        doing = self.engine.activity
        self.log.append(threading.get_ident() in self.engine._inside)
        self.log.append((name, target, source, op, root, round(deadline - doing.since, 3), doing.inside, doing.now))
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


class Written(torch.Tensor):
    """A tensor that is like any other in the log."""

    def __eq__(self, other: object) -> bool:  # type: ignore[override]
        return isinstance(other, Written)

    __hash__ = None  # type: ignore[assignment]


def activity_of(kinds: dict[str, Any], log: list[Any]) -> Any:
    class Doing(kinds["Doing"]):  # type: ignore[misc]  # whichever it is
        def enter(self, noted: Any, awaited: Any = ()) -> None:
            self.now, self.awaited, self.inside, self.since = noted, awaited, True, monotonic()
            if self.record:
                log.append(("enter", noted, awaited))

        def leave(self) -> None:
            self.inside = False
            if self.record:
                log.append(("leave", self.now))

        # As `Activity` does, where there is one.
        note, post = Activity.note, Activity.post

    return Doing()


def engine_of(kinds: dict[str, Any], log: list[Any]) -> Any:
    """An engine of these parts, and no other."""

    class Engine(kinds["Quickly"]):  # type: ignore[misc]  # whichever it is
        def __init__(self) -> None:
            self.activity, self.quick, self._sink, self._limit_s = activity_of(kinds, log), Quick(log), SINK, 7.0
            self.quick.engine = self
            self.activity.record = None
            self.owner, self.closed, self._broken, self._calls, self._pending, self._rank = None, False, None, 0, 0, 1
            self._inside: set[int] = set()

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
    st.tuples(st.just("inside"), st.sets(st.integers(1, 2), max_size=1)),
    st.tuples(st.just("broken"), st.sampled_from([None, "cause"])),
    st.tuples(st.just("closed"), st.booleans()),
    st.tuples(st.just("record"), st.sampled_from([None, "record"])),
    st.tuples(st.just("sink"), st.sampled_from([None, "sink"])),
    st.tuples(st.just("quick"), st.booleans()),
    st.tuples(st.just("keep"), st.text(max_size=3)),
)
QUICK_CALLS = st.tuples(
    st.just("call"),
    st.sampled_from(["all_reduce", "broadcast", "reduce"]),
    st.sampled_from(["sum", "", 3]),
    st.sampled_from([None, 0, 1, 300, True]),
    st.sampled_from([None, 2.5, 3, -1.0, "soon"]),
    st.sampled_from([True, False, ValueError, KeyError, KeyboardInterrupt]),
)
MESSAGES = st.tuples(
    st.just("message"),
    st.sampled_from(["send", "recv"]),
    st.sampled_from([0, 1, 255, 256, 300, -1]),
    st.sampled_from([0, 1, 300]),
    st.sampled_from([None, 2.5, -1.0]),
    st.sampled_from([True, True, False, ValueError, KeyError, KeyboardInterrupt]),
)
# After each change a call, and then all is as it was: few changes in a row let a call through.
STEPS = st.tuples(CHANGES, st.one_of(QUICK_CALLS, MESSAGES), st.booleans())


AS_IT_WAS = [("owner", "here"), ("pending", 0), ("broken", None), ("closed", False), ("sink", None), ("quick", True)]
AS_IT_WAS += [("inside", set())]


def played(kinds: dict[str, Any], rounds: list[tuple[Any, Any, bool]]) -> list[Any]:
    log: list[Any] = []
    engine, tensor = engine_of(kinds, log), Written()
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
        elif kind in ("call", "message"):
            name, *how, timeout, outcome = values
            given = (name, tensor, *how, timeout) if kind == "message" else (name, tensor, "source", *how, timeout)
            quick.outcome = outcome("told") if isinstance(outcome, type) else outcome
            try:
                log.append((engine.message if kind == "message" else engine.method)(*given))
            except BaseException as error:
                log.append((type(error), str(error), type(error.__cause__), error.__traceback__ is not None))
        else:
            setattr(engine, kind if kind == "closed" else f"_{kind}", values[0])
        doing = engine.activity
        log.append(engine._inside.copy())
        log.append((engine._calls, doing.calls, doing.inside, doing.now, doing.latest, engine.owner))
        log.append((doing.messages, doing.awaited, sorted(doing.posted.items()), tensor._version))
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
