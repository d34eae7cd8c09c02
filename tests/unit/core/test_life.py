"""A communicator passes through the phases of its table, whatever happens to it in which order."""

from __future__ import annotations

import re
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import unisono as un
from unisono.communicator import engine_of
from unisono.core.failure import Cause
from unisono.core.flight_recorder import ActivityRegistry
from unisono.core.hold import HOLD
from unisono.core.life import TRANSITIONS, Event, Life, Phase
from unisono.errors import AbortedError, ClosedError

CLOSED = (Phase.CLOSING, Phase.CLOSED, Phase.RETIRED)


class Lives(RuleBasedStateMachine):
    """One communicator, and what its table says of it."""

    @initialize()
    def begin(self) -> None:
        self.comm = un.init()
        self.engine = engine_of(self.comm)
        self.expected = Phase.OPEN
        self.first: str | None = None
        self.aborted: list[str] = []
        self.patched = patch.object(self.engine.transport, "abort", lambda error: self.aborted.append(str(error)))
        self.patched.start()

    def after(self, event: Event) -> bool:
        then = TRANSITIONS[event].get(self.expected)
        self.expected = then or self.expected
        return then is not None

    @rule()
    def hold(self) -> None:
        HOLD.stop([self.engine.activity])
        self.after("hold")

    @rule()
    def go(self) -> None:
        HOLD.go()
        self.after("go")

    @rule(text=st.sampled_from(["no memory", "no power"]))
    def fail(self, text: str) -> None:
        if HOLD.holds(self.engine.activity):
            # A failure releases the ranks.
            self.after("go")
        self.engine.failures.fail(Cause("AbortedError", 0, text))
        assert not HOLD.holds(self.engine.activity)
        if self.after("fail"):
            self.first = text

    @rule(fails=st.booleans())
    def close(self, fails: bool) -> None:
        def drain(_timeout_s: float) -> None:
            self.phase_is_that_of_the_table()
            self.calls_do_what_the_phase_says()
            if fails:
                self.fail("no time")

        before = self.expected
        if before not in CLOSED:
            self.after("close")
        with patch.object(self.engine._helper, "join", drain):
            self.comm.close()
        if before not in CLOSED:
            self.after("drain")

    @rule()
    def retire(self) -> None:
        retires = self.after("retire")
        before = len(self.aborted)
        self.engine.retire()
        assert len(self.aborted) - before == retires
        del self.aborted[before:]

    @invariant()
    def phase_is_that_of_the_table(self) -> None:
        life = self.engine.life
        assert life.phase is self.expected
        assert life.closed == (self.expected in CLOSED)
        assert self.first == (None if life.cause is None else life.cause.message)
        # The first cause ends every wait, and no other does.
        assert [text.partition(": ")[2] for text in self.aborted] == ([] if self.first is None else [self.first])

    @invariant()
    def calls_do_what_the_phase_says(self) -> None:
        tensor = torch.ones(2)
        if self.expected is Phase.OPEN:
            self.comm.all_reduce(tensor)
        elif self.expected is Phase.BROKEN:
            with pytest.raises(AbortedError, match=str(self.first)):
                self.comm.all_reduce(tensor)
        elif self.expected is not Phase.HELD:
            with pytest.raises(ClosedError):
                self.comm.all_reduce(tensor)
        assert tensor.tolist() == [1.0, 1.0]

    @invariant()
    def reports_show_open_communicators(self) -> None:
        registry = ActivityRegistry()
        registry.add(self.engine.activity)
        shown = [group["broken"] for group in registry.report()["groups"]]
        assert shown == ([] if self.expected in CLOSED else [self.first is not None])

    def teardown(self) -> None:
        HOLD.go()
        self.patched.stop()
        self.comm.close()


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=150, stateful_step_count=6, deadline=None)


def test_docstring_has_the_table() -> None:
    """Columns are events, rows are phases."""
    lines = [line for line in (Life.__doc__ or "").splitlines() if re.match(r" +(phase|=+|[A-Z]+)( |$)", line)]
    spans = [match.span() for match in re.finditer("=+", lines[0])]
    rows = [[line[start:stop].strip() for start, stop in spans] for line in lines if "==" not in line]
    found = {
        event: {Phase[row[0]]: Phase[row[number]] for row in rows[1:] if row[number]}
        for number, event in enumerate(rows[0])
        if number
    }
    assert found == TRANSITIONS
