"""One rank's part of a batch of programs, with a `GradientAverager`."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch
from averager_changes import CHANGES
from averager_models import PlannedError, Worker
from averager_oracle import Record, recorded, short
from averager_programs import Case, Change, Failure, Step
from averager_reference import ReferenceAverager

import unisono as un
from unisono.errors import CommError, CommTimeoutError, MismatchError

__all__ = ["Averager", "Outcome", "run_batch"]

Averager = type[un.GradientAverager] | type[ReferenceAverager]

_ATTEMPTS = 8
"""After so many failures of a pass that was planned to fail once, it is not going to succeed."""
_FAILURES = 2
"""After so many a batch ends: each may take as long as a timeout."""
_PROMPT_S = 5.0
"""A change of the model is answered within this time, half of the communicator's timeout."""


@dataclass
class Outcome:
    """The outcome of one program on one rank.

    Attributes:
        records: One for each pass that succeeded.
        problem: What is wrong, or None.
        apart: Whether ranks could not go on to the next program.
        change: After a change of the model how the next pass ended: "error"; "success"; "refused", which is a success
            after the change itself ended in an error; or what is wrong with its error.
    """

    records: list[Record] = field(default_factory=list)
    problem: str | None = None
    apart: bool = False
    change: str | None = None


def run_batch(comm: un.Communicator, cases: Sequence[Case], make: Averager) -> list[Outcome]:
    """Run programs, until some have failed, or ranks do not meet after one."""
    outcomes, failed = [], 0
    for case in cases:
        outcomes.append(Outcome())
        try:
            with comm.dup() as part:
                _Program(case, part, make, outcomes[-1]).run()
        except Exception:
            outcomes[-1].problem = traceback.format_exc(limit=-6)
        try:
            failed += any(comm.all_gather_object(outcomes[-1].problem is not None))
        except CommError as error:
            outcomes[-1].problem = f"{outcomes[-1].problem or ''}\nRanks do not meet after the program: {error}"
            outcomes[-1].apart = True
            break
        if failed == _FAILURES:
            break
    return outcomes


class _Program:
    """A running program."""

    def __init__(self, case: Case, comm: un.Communicator, make: Averager, outcome: Outcome) -> None:
        self.case, self.comm, self.outcome = case, comm, outcome
        self.worker = Worker(case, comm.rank)
        self.averager = make(self.worker.model, comm, **case.options)
        if isinstance(self.averager, ReferenceAverager):
            self.worker.around = self.averager.around
        self.worker.hook("late")
        if case.compiled:
            self.worker.compile()

    def run(self) -> None:
        try:
            for number, step in enumerate(self.case.steps):
                try:
                    self._step(step)
                except Exception as error:
                    error.add_note(f"in step {number}")
                    raise
            if self.case.change is not None:
                self._change(self.case.change)
        finally:
            with suppress(Exception):
                self.averager.remove()

    def _step(self, step: Step) -> None:
        self.worker.prepare(step)
        if step.weights is not None:
            self.averager.weight(step.weights[self.worker.rank])
        for number, one in enumerate(step.passes[:-1]):
            with self.averager.no_sync():
                self._succeed(partial(self.worker.run, one), None if number else step.stumble, PlannedError)
            self.outcome.records.append(recorded(self.worker, averaged=False))
        if not step.succeeds:
            self._fail(step)
            return
        self._succeed(partial(self._run, step), step.failure, PlannedError, CommError)
        self.outcome.records.append(recorded(self.worker, averaged=True))
        self.worker.finish(step)

    def _succeed(self, run: Callable[[], None], failure: Failure | None, *kinds: type[Exception]) -> None:
        """Make a pass, again and again where it is planned to fail at first, with errors of these kinds."""
        for attempt in range(_ATTEMPTS):
            held = self._held()
            planned = failure is not None and attempt < failure.times
            self.worker.plan = failure.places[self.worker.rank] if failure is not None and planned else None
            try:
                run()
                return
            except kinds as error:
                if failure is None or isinstance(error, CommTimeoutError):
                    raise
                self._check_held(held, error)
        raise AssertionError(f"no success in {_ATTEMPTS} attempts")

    def _fail(self, step: Step) -> None:
        """Make the averaged pass, which has to end in an error on every rank."""
        held = self._held()
        self.worker.plan = step.failure.places[self.worker.rank] if step.failure else None
        kinds = (MismatchError,) if step.mismatch else (PlannedError, CommError)
        try:
            self._run(step)
        except kinds as error:
            if isinstance(error, CommTimeoutError):
                raise
            self._check_held(held, error)
        else:
            raise AssertionError("no error")
        finally:
            self.worker.plan = None

    def _run(self, step: Step) -> None:
        self.worker.run(step.passes[-1], retain=step.retain, reuse=step.reuse, thread=step.thread)

    def _held(self) -> dict[str, torch.Tensor | None]:
        items = self.worker.parameters.items()
        return {name: None if p.grad is None else p.grad.detach().to_dense().clone() for name, p in items}

    def _check_held(self, before: dict[str, torch.Tensor | None], error: Exception) -> None:
        """A pass that raised leaves gradients as they were."""
        for name, now in self._held().items():
            was = before[name]
            if (now is None) != (was is None) or (now is not None and was is not None and not _same(now, was)):
                kind = type(error).__name__
                message = f"a pass that raised {kind} left p.grad of {name} at {_short(now)} in place of {_short(was)}"
                raise AssertionError(message) from error

    def _change(self, change: Change) -> None:
        """Change the model, and make another pass."""
        # The error may reach ranks that are still in the pass before.
        self.comm.barrier()
        model, mine = self.worker.model, self.worker.rank in change.ranks
        known = {name: id(p) for name, p in model.named_parameters()}
        refused, error, began = False, None, time.monotonic()
        if mine:
            try:
                CHANGES[change.kind](model)
            except RuntimeError:
                refused = known == {name: id(p) for name, p in model.named_parameters()}
        try:
            self.worker.run(self.case.last)
        except RuntimeError as caught:
            error = caught
        took_s = time.monotonic() - began
        if isinstance(error, CommTimeoutError) or took_s > _PROMPT_S:
            self.outcome.change = f"{error!r} after {took_s:.1f} s"
        elif error is None:
            self.outcome.change = "refused" if refused else "success"
            self.outcome.records.append(recorded(self.worker, averaged=True))
        else:
            self.outcome.change = "error" if mine or isinstance(error, CommError) else f"{error!r}"


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) or torch.allclose(one, other, 0, 0, equal_nan=True)


def _short(grad: torch.Tensor | None) -> str:
    return "None" if grad is None else short(grad)
