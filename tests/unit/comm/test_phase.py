"""A communicator passes through the phases of its table, whatever happens to it in which order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import unisono as un
from unisono.comm.phase import Phase
from unisono.communicator import engine_of
from unisono.core.failure import Cause
from unisono.errors import AbortedError, ClosedError

TABLE = {
    ("open", "hold"): "held",
    ("open", "fail"): "broken",
    ("open", "close"): "closed",
    ("open", "retire"): "retired",
    ("held", "go"): "open",
    ("held", "fail"): "broken",
    ("held", "close"): "closed",
    ("held", "retire"): "retired",
    ("broken", "close"): "closed",
    ("broken", "retire"): "retired",
}


class Lives(RuleBasedStateMachine):
    """One communicator, and what its table says of it."""

    @initialize()
    def begin(self) -> None:
        self.comm = un.init()
        self.engine = engine_of(self.comm)
        self.phase = "open"

    def after(self, event: str) -> bool:
        then = TABLE.get((self.phase, event))
        self.phase = then or self.phase
        return then is not None

    @rule()
    def hold(self) -> None:
        assert self.engine.suspend() == self.after("hold")

    @rule()
    def go(self) -> None:
        self.engine.resume()
        self.after("go")

    @rule()
    def fail(self) -> None:
        text = "a later cause" if self.engine.broken else "the first cause"
        self.engine.on_failure(Cause("AbortedError", 0, text))
        self.after("fail")

    @rule()
    def close(self) -> None:
        self.comm.close()
        self.after("close")

    @rule()
    def retire(self) -> None:
        self.engine.retire()
        self.after("retire")

    @invariant()
    def phase_is_that_of_the_table(self) -> None:
        assert self.engine.life.phase is Phase(self.phase)
        assert self.engine.closed == (self.phase in ("closed", "retired"))

    @invariant()
    def calls_do_what_the_phase_says(self) -> None:
        tensor = torch.ones(2)
        if self.phase == "open":
            self.comm.all_reduce(tensor)
        elif self.phase == "broken":
            with pytest.raises(AbortedError, match="the first cause"):
                self.comm.all_reduce(tensor)
        elif self.phase != "held":
            with pytest.raises(ClosedError):
                self.comm.all_reduce(tensor)
        assert tensor.tolist() == [1.0, 1.0]

    def teardown(self) -> None:
        self.comm.close()


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=30, stateful_step_count=8, deadline=None)
