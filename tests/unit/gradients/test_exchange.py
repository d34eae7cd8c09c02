"""The phases of an exchange: the table in the docstring, and the averager, for any order of events."""

from __future__ import annotations

import re
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import unisono as un
from unisono.gradients.anchor import OuterUpdate
from unisono.gradients.exchange import TRANSITIONS, Exchange, Phase
from unisono.gradients.periodic_averager import PeriodicAverager

LAG = 2


class PlannedError(Exception):
    """The error of a reduction that is to fail."""


class Exchanges(RuleBasedStateMachine):
    """Exchanges of one rank, sent after each third step and applied two steps later; the other ranks are the events."""

    @initialize()
    def begin(self) -> None:
        self.model = torch.nn.Linear(1, 1, bias=False)
        self.fill(0.0)
        self.comm = un.init()
        self.fails = False
        outer = OuterUpdate(partial(torch.optim.SGD, lr=1.0))
        self.averager = PeriodicAverager(
            self.model, self.comm, 3, outer=outer, reduce=self.reduce, overlap_steps=LAG, alpha=0.0
        )
        self.exchange: Exchange | None = None
        self.expected = Phase.UNDER_WAY
        self.over: list[tuple[Exchange, Phase]] = []
        self.anchor = 0.0

    def reduce(self, flat: torch.Tensor, comm: un.Communicator, turn: int) -> None:
        if self.fails:
            raise PlannedError

    def fill(self, value: float) -> None:
        torch.nn.init.constant_(self.model.weight, value)

    @precondition(lambda self: not self.fails)
    @rule(learnt=st.integers(1, 4), fails=st.booleans())
    def step(self, learnt: int, fails: bool) -> None:
        weight = self.model.weight.item() + learnt
        self.fill(weight)
        step = self.averager.steps + 1
        if step % 3 == 0:
            self.fails = fails
        self.averager.step()
        if self.exchange is not None and step % 3 == LAG:
            dropped = self.expected in (Phase.OUTDATED, Phase.DROPPED)
            if not dropped:
                self.anchor = self.sent
            self.over.append((self.exchange, Phase.DROPPED if dropped else Phase.APPLIED))
            self.exchange = None
        if step % 3 == 0:
            self.exchange = self.averager._fragments[0].exchange
            self.expected = Phase.UNDER_WAY
            self.sent = weight
            if fails:
                assert self.exchange is not None
                with pytest.raises(PlannedError):
                    self.exchange.done.wait()

    @precondition(lambda self: self.fails)
    @rule()
    def step_after_a_failure(self) -> None:
        with pytest.raises(PlannedError):
            self.averager.step()

    @rule()
    def save(self) -> None:
        """A state waits for what is under way."""
        if self.fails:
            with pytest.raises(PlannedError):
                self.averager.state_dict()
            self.expected = Phase.FAILED
            return
        saved = self.averager.state_dict()["under_way"][0]
        if self.exchange is not None:
            self.after("arrive")
            assert (saved is not None) == (self.expected is Phase.ARRIVED)

    @rule(value=st.integers(-9, 9))
    def load(self, value: int) -> None:
        self.model.load_state_dict({"weight": torch.full((1, 1), float(value))})
        self.anchor = float(value)
        if self.exchange is not None:
            self.after("load")

    def after(self, event: str) -> None:
        self.expected = TRANSITIONS[event].get(self.expected, self.expected)

    @invariant()
    def phases_and_the_anchor_are_those_of_the_table(self) -> None:
        if self.exchange is not None:
            assert self.exchange.phase is self.expected
        for exchange, phase in self.over:
            assert exchange.phase is phase
        assert self.averager.anchor[0].item() == self.anchor

    def teardown(self) -> None:
        self.averager.close()
        self.comm.close()


TestExchanges = Exchanges.TestCase
TestExchanges.settings = settings(max_examples=30, stateful_step_count=15, deadline=None)


def test_docstring_has_the_table() -> None:
    """Columns are events, rows are phases."""
    lines = [line for line in (Exchange.__doc__ or "").splitlines() if re.match(r" +(phase|=+|[A-Z_]+)( |$)", line)]
    spans = [match.span() for match in re.finditer("=+", lines[0])]
    rows = [[line[start:stop].strip() for start, stop in spans] for line in lines if "==" not in line]
    found = {
        event: {Phase[row[0]]: Phase[row[number]] for row in rows[1:] if row[number]}
        for number, event in enumerate(rows[0])
        if number
    }
    assert found == TRANSITIONS
