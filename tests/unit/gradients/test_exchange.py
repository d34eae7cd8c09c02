"""An exchange in flight while its averager is loaded, saved, interrupted and moved, in any order."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import partial
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import unisono as un
from unisono.gradients.anchor import OuterUpdate
from unisono.gradients.periodic_averager import PeriodicAverager

LAG = 2
EVERY = 3
RATE = 0.5


class PlannedError(Exception):
    """The error of a reduction that is to fail."""


@dataclass
class Flight:
    """What one exchange has of each layer: the weight that was sent, the prediction, and whether it was loaded."""

    sent: list[float]
    predicted: list[float]
    loaded: list[bool] = field(default_factory=lambda: [False, False])


class Exchanges(RuleBasedStateMachine):
    """Exchanges of one rank, sent after each third step and applied two steps later; of two layers in one fragment."""

    @initialize()
    def begin(self) -> None:
        self.layers = [torch.nn.Linear(1, 1, bias=False).double() for _ in range(2)]
        self.model = torch.nn.Sequential(*self.layers)
        for layer in self.layers:
            torch.nn.init.zeros_(layer.weight)
        self.comm = un.init()
        self.fails = False
        outer = OuterUpdate(partial(torch.optim.SGD, lr=RATE))
        self.averager = PeriodicAverager(
            self.model, self.comm, EVERY, outer=outer, reduce=self.reduce, overlap_steps=LAG
        )
        self.weights = [0.0, 0.0]
        self.anchor = [0.0, 0.0]
        self.flight: Flight | None = None
        # Until the next step, loading the model leaves a restored anchor alone.
        self.resumed = False

    def reduce(self, flat: torch.Tensor, comm: un.Communicator, turn: int) -> None:
        if self.fails:
            raise PlannedError

    def land(self) -> None:
        """Apply the result to what was not loaded meanwhile; this rank alone has contributed, so it was predicted."""
        if self.flight is not None:
            for i in range(2):
                if not self.flight.loaded[i]:
                    self.anchor[i] = self.flight.predicted[i]
            self.flight = None

    @precondition(lambda self: not self.fails)
    @rule(learnt=st.integers(1, 4), fails=st.booleans())
    def step(self, learnt: int, fails: bool) -> None:
        with torch.no_grad():
            for i, layer in enumerate(self.layers):
                layer.weight += learnt
                self.weights[i] += learnt
        sends = (self.averager.steps + 1) % EVERY == 0
        self.fails = fails and sends
        self.averager.step()
        self.resumed = False
        if self.averager.steps % EVERY == LAG:
            self.land()
        if sends:
            predicted = [a + RATE * (w - a) for a, w in zip(self.anchor, self.weights, strict=True)]
            self.flight = Flight(self.weights, predicted)
            self.weights = list(predicted)
            exchange = self.averager._fragments[0].exchange
            assert exchange is not None
            if fails:
                with pytest.raises(PlannedError):
                    exchange.wait()
            else:
                exchange.wait()

    @precondition(lambda self: self.fails)
    @rule()
    def use_after_a_failure(self) -> None:
        for call in (self.averager.step, self.averager.finish, self.averager.state_dict):
            with pytest.raises(PlannedError):
                call()

    @precondition(lambda self: not self.fails)
    @rule()
    def resume(self) -> None:
        self.averager.load_state_dict(copy.deepcopy(self.averager.state_dict()))
        self.resumed = True

    @precondition(lambda self: self.flight is not None and not self.fails)
    @rule()
    def interrupt(self) -> None:
        """Interrupt a wait just before it notices that the exchange has ended."""
        exchange = self.averager._fragments[0].exchange
        assert exchange is not None
        for call in (self.averager.state_dict, self.averager.finish):
            with (
                mock.patch.object(exchange.done, "wait", side_effect=KeyboardInterrupt),
                pytest.raises(KeyboardInterrupt),
            ):
                call()

    @rule(value=st.integers(-9, 9), layers=st.sampled_from([[0], [1], [0, 1]]))
    def load(self, value: int, layers: list[int]) -> None:
        for i in layers:
            self.layers[i].load_state_dict({"weight": torch.full((1, 1), float(value))})
            self.weights[i] = float(value)
            if self.resumed:
                continue
            self.anchor[i] = float(value)
            if self.flight is not None:
                self.flight.loaded[i] = True

    @precondition(lambda self: not self.fails)
    @rule()
    def finish(self) -> None:
        """Move the anchor by all that was learnt."""
        self.averager.finish()
        self.flight = None
        self.anchor = list(self.weights)

    @rule()
    def move(self) -> None:
        if self.flight is not None and self.fails:
            for i in range(2):
                if not self.flight.loaded[i]:
                    self.weights[i] += self.flight.sent[i] - self.flight.predicted[i]
            self.flight = None
        self.land()
        self.fails = False
        self.averager.move_to(self.comm)
        self.resumed = True

    @invariant()
    def weights_and_anchor_are_right(self) -> None:
        assert [layer.weight.item() for layer in self.layers] == self.weights
        assert [there.item() for there in self.averager.anchor] == self.anchor

    def teardown(self) -> None:
        self.averager.close()
        self.comm.close()


TestExchanges = Exchanges.TestCase
TestExchanges.settings = settings(max_examples=30, stateful_step_count=15, deadline=None)
