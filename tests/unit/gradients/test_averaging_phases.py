"""The phases of an averager's pass: the table in the docstring, and the class, for any order of events."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import nn

import unisono as un
from unisono.gradients.averaging import TRANSITIONS, AveragerSettings, Averaging, Phase
from unisono.gradients.reduction import Reduction
from unisono.gradients.weights import Weights
from unisono.transports.thread import ThreadTransport

ONE_A_BUCKET = 4
LAYERS = 3


class PlannedError(Exception):
    """The error that a hook raises on purpose."""


class Passes(RuleBasedStateMachine):
    """Backward passes of one rank, with its buckets on the way while others fill; the other ranks are the events."""

    @initialize()
    def attach(self) -> None:
        self.patched = patch.object(ThreadTransport, "background", True)
        self.patched.start()
        comm = un.init("thread")
        self.model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(LAYERS)))
        for parameter in self.model.parameters():
            nn.init.ones_(parameter)
        self.averaging = Averaging(
            self.model,
            list(self.model.named_parameters()),
            comm,
            AveragerSettings((ONE_A_BUCKET, ONE_A_BUCKET), None, False, False, False, False),
            Weights(comm),
            init_sync=False,
        )
        # As if there were other ranks.
        self.averaging._install()
        averaging = self.averaging
        averaging._reduction = Reduction(averaging.buckets, averaging._weights)
        self.wanted = [0.0] * LAYERS
        self.expected = Phase.IDLE

    def backward(self) -> None:
        self.model(torch.ones(1)).sum().backward()

    @contextmanager
    def raising(self, layer: int) -> Iterator[None]:
        def fail(_: torch.Tensor) -> None:
            raise PlannedError

        handle = self.model[layer].weight.register_hook(fail)
        with pytest.raises(PlannedError):
            yield
        handle.remove()

    @rule(syncing=st.booleans(), aborted=st.booleans())
    def succeed(self, syncing: bool, aborted: bool) -> None:
        self.averaging.syncing = syncing
        if aborted:
            self.averaging.comms.abort("another rank's pass has failed")
        self.backward()
        self.averaging.syncing = True
        self.wanted = [value + 1 for value in self.wanted]
        self.expected = Phase.IDLE

    @rule(layer=st.integers(0, LAYERS - 1), syncing=st.booleans(), aborted=st.booleans())
    def raise_in_a_hook(self, layer: int, syncing: bool, aborted: bool) -> None:
        self.averaging.syncing = syncing
        if aborted:
            self.averaging.comms.abort("another rank's pass has failed")
        broken = self.averaging.comms.data.exception() is not None
        with self.raising(layer):
            self.backward()
        self.averaging.syncing = True
        # Gradients arrive from the last layer to the first, except in the first step's order, which is learned.
        sent = syncing and not broken and layer < LAYERS - 1
        self.expected = Phase.FAILED if sent else Phase.UNSENT

    @rule()
    def raise_before_a_parameter(self) -> None:
        def fail(_: torch.Tensor) -> None:
            raise PlannedError

        out = self.model(torch.ones(1))
        out.register_hook(fail)
        with pytest.raises(PlannedError):
            out.sum().backward()
        self.expected = Phase.FAILED if self.averaging.phase is Phase.FAILED else Phase.UNSENT

    @rule()
    def raise_with_the_means(self) -> None:
        problem = patch.object(self.averaging, "_look_at", side_effect=PlannedError)
        uneven = patch("unisono.gradients.reduction.Reduction.conclude", lambda self: setattr(self, "uneven", True))
        with problem, uneven, pytest.raises(PlannedError):
            self.backward()
        self.expected = Phase.FAILED

    @invariant()
    def p_grad_is_as_the_phase_says(self) -> None:
        averaging = self.averaging
        assert averaging.phase is self.expected
        assert [0.0 if p.grad is None else p.grad.item() for p in self.model.parameters()] == self.wanted
        assert averaging._saved is None
        assert (averaging.phase in (Phase.IDLE, Phase.UNSENT)) <= (averaging._reduction.sent == 0)

    def teardown(self) -> None:
        self.averaging.remove()
        self.patched.stop()


TestPasses = Passes.TestCase
TestPasses.settings = settings(max_examples=15, stateful_step_count=12, deadline=None)


def events_of(aborted: bool) -> list[str]:
    """The events of a pass, before which another rank's may have failed."""
    machine = Passes()
    machine.attach()
    with patch.object(Averaging, "_change", autospec=True, side_effect=Averaging._change) as change:
        machine.succeed(syncing=True, aborted=aborted)
    machine.teardown()
    return [call.args[1] for call in change.call_args_list]


def test_pass_is_held_where_another_rank_has_failed() -> None:
    assert events_of(aborted=False) == ["begin", "reduce", "average", "finish"]
    assert events_of(aborted=True) == ["begin", "hold", "reduce", "average", "finish"]


def test_docstring_has_the_table() -> None:
    """Columns are events, rows are phases."""
    lines = [line for line in (Averaging.__doc__ or "").splitlines() if re.match(r" +(phase|=+|[A-Z]+) ", line)]
    spans = [match.span() for match in re.finditer("=+", lines[0])]
    rows = [[line[start:stop].strip() for start, stop in spans] for line in lines if "==" not in line]
    found = {
        event: {Phase[row[0]]: Phase[row[number]] for row in rows[1:] if row[number]}
        for number, event in enumerate(rows[0])
        if number
    }
    assert found == TRANSITIONS
