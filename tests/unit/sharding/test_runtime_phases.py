"""The phases of a sharded model between two steps of its optimizer, for any order of events."""

from __future__ import annotations

import re
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import nn

import unisono as un
from unisono.sharding import ShardedModel
from unisono.sharding.runtime import TRANSITIONS, Runtime, StepPhase


class PlannedError(Exception):
    """The error that a hook raises on purpose."""


class Steps(RuleBasedStateMachine):
    """Passes and steps of a model on one rank, with and without errors and closures."""

    @initialize()
    def shard(self) -> None:
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        self.sharded = ShardedModel(self.model, un.init("thread"), units=[nn.Linear])
        self.optimizer = self.sharded.optimizer(torch.optim.SGD, lr=0.1)
        self.expected = StepPhase.STEPPED

    def backward(self, *, fails: bool = False) -> None:
        out = self.model(torch.ones(1, 2))
        if fails:
            out.register_hook(self.fail)
        out.sum().backward()

    def fail(self, *_: object) -> None:
        raise PlannedError

    def phase(self) -> StepPhase:
        return self.sharded._runtime.phase

    @rule(fails=st.booleans(), syncing=st.booleans())
    def run_a_pass(self, fails: bool, syncing: bool) -> None:
        runtime = self.sharded._runtime
        runtime.sync = syncing or fails
        if fails:
            with pytest.raises(PlannedError):
                self.backward(fails=True)
        else:
            self.backward()
        runtime.sync = True
        self.expected = StepPhase.UNSTEPPED
        if not syncing and not fails:
            self.backward()

    def closure(self, fails: bool) -> Callable[[], float]:
        def closure() -> float:
            with torch.enable_grad():
                self.backward()
            assert self.phase() is StepPhase.STEPPING
            if fails:
                self.fail()
            return 0.0

        return closure

    @rule(with_closure=st.booleans())
    def step(self, with_closure: bool) -> None:
        self.optimizer.step(self.closure(fails=False) if with_closure else None)
        self.expected = StepPhase.STEPPED

    @invariant()
    def phase_is_as_expected(self) -> None:
        assert self.phase() is self.expected
        assert self.sharded._runtime._running is None

    def teardown(self) -> None:
        self.sharded.remove()


TestSteps = Steps.TestCase
TestSteps.settings = settings(max_examples=8, stateful_step_count=8, deadline=None)


def test_failed_step_leaves_its_gradients_unstepped() -> None:
    machine = Steps()
    machine.shard()
    with pytest.raises(PlannedError):
        machine.optimizer.step(machine.closure(fails=True))
    assert machine.phase() is StepPhase.UNSTEPPED


def test_docstring_has_the_table() -> None:
    """Columns are events, rows are phases."""
    lines = [line.split() for line in (Runtime.__doc__ or "").splitlines() if re.match(r" +(phase|[A-Z]+) +\w", line)]
    rows = [line for line in lines if len(line) == len(lines[0])]
    found = {
        event: {StepPhase[row[0]]: StepPhase[row[number]] for row in rows[1:]}
        for number, event in enumerate(rows[0])
        if number
    }
    assert found == TRANSITIONS
