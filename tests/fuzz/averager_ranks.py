"""One rank's part of a batch of programs, with a `GradientAverager`."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from averager_changes import CHANGES
from averager_models import PlannedError, Worker
from averager_oracle import Record, recorded, recorded_model, short
from averager_programs import Case, Change, Failure, Pass, Step
from averager_reference import ReferenceAverager

import unisono as un
from unisono.errors import AbortedError, CommError, CommTimeoutError, MismatchError

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
        records: One for each pass that succeeded; None for a pass of ranks that still have data.
        problem: What is wrong, or None.
        apart: Whether ranks could not go on to the next program.
        change: After a change of the model how the next pass ended: "error"; "success"; "refused", which is a success
            after the change itself ended in an error; or what is wrong with its error.
    """

    records: list[Record | None] = field(default_factory=list)
    problem: str | None = None
    apart: bool = False
    change: str | None = None


def run_batch(comm: un.Communicator, cases: Sequence[Case], make: Averager) -> list[Outcome]:
    """Run programs, until some have failed, or ranks do not meet after one."""
    outcomes, failed = [], 0
    for case in cases:
        outcomes.append(Outcome())
        try:
            _Program(case, comm, make, outcomes[-1]).run()
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
        self.averagers = [make(model, comm, **case.options) for model in self._models()]
        for averager in self.averagers:
            if isinstance(averager, ReferenceAverager):
                self.worker.around = partial(averager.around, self.worker.around)
        self.worker.hook("late")
        if case.compiled:
            self.worker.compile()

    def _models(self) -> list[Any]:
        """Return the model or parameters of each averager."""
        model = self.worker.model
        if not self.case.parts:
            return [model]
        groups = self.case.groups()
        lists = [[p for name, p in model.named_parameters() if name in group] for group in groups]
        modules = [] if self.case.listed else [model.get_submodule(part) for part in self.case.parts]
        return [*modules, *lists[len(modules) :]]

    def run(self) -> None:
        steps = list(enumerate(self.case.walk()))
        alone = len(steps) - self.case.joined
        try:
            for number, (step, following) in steps[:alone]:
                self._noted(number, step, following)
            if self.case.joined:
                with self.averagers[0].join():
                    for number, (step, following) in steps[alone:]:
                        self._noted(number, step, following)
                self.outcome.records.append(recorded_model(self.worker))
            if self.case.change is not None:
                self._change(self.case.change)
        finally:
            for averager in self.averagers:
                with suppress(Exception):
                    averager.remove()

    def _noted(self, number: int, step: Step, following: Pass | None) -> None:
        if step.ranks is not None and self.worker.rank not in step.ranks:
            self.outcome.records += [None] * len(step.passes)
            return
        try:
            self._step(step, following)
        except Exception as error:
            error.add_note(f"in step {number}")
            raise

    def _step(self, step: Step, following: Pass | None) -> None:
        worker = self.worker
        worker.prepare(step)
        for number, one in enumerate(step.passes[:-1]):
            self._weigh(worker.weigh(step, number))
            with ExitStack() as stack:
                for averager in self.averagers:
                    stack.enter_context(averager.no_sync())
                self._succeed(partial(worker.run, one), None if number else step.stumble)
            worker.memory.adopt(worker.before)
            self.outcome.records.append(recorded(worker))
        weight = worker.weigh(step, len(step.passes) - 1)
        if step.again:
            self._weigh_again()
            return
        self._weigh(weight)
        how = {"ahead": step.ahead, "following": following, "reuse": step.reuse, "thread": step.thread}
        run = partial(worker.run, step.passes[-1], **how)
        if not step.succeeds:
            self._fail(step, run)
            return
        self._succeed(run, step.failure)
        self.outcome.records.append(recorded(worker))
        worker.finish(step)

    def _weigh(self, weight: float | None) -> None:
        if weight is not None:
            for averager in self.averagers:
                averager.weight(weight)

    def _weigh_again(self) -> None:
        try:
            self._weigh(1.0)
        except RuntimeError as error:
            if "weight()" not in str(error):
                raise
        else:
            raise AssertionError("a second weight() is no error")

    def _succeed(self, run: Callable[[], None], failure: Failure | None) -> None:
        """Make a pass, again and again where it is planned to fail at first."""
        buffers = self.worker.buffers()
        for attempt in range(_ATTEMPTS):
            planned = failure is not None and attempt < failure.times
            self.worker.plan = failure if planned else None
            try:
                run()
            except (PlannedError, RuntimeError) as error:
                if failure is None or not (planned or failure.how == "raise"):
                    raise
                self._check_error(error, failure)
                self.worker.load_buffers(buffers)
            else:
                if failure is not None and planned and failure.how != "raise":
                    raise AssertionError("no error although a hook has used a gradient before it was averaged")
                return
        raise AssertionError(f"no success in {_ATTEMPTS} attempts")

    def _fail(self, step: Step, run: Callable[[], None]) -> None:
        """Make the averaged pass, which has to end in an error on every rank."""
        buffers = self.worker.buffers()
        self.worker.plan = step.failure
        try:
            run()
        except (PlannedError, RuntimeError) as error:
            self._check_error(error, step.failure)
            self.worker.load_buffers(buffers)
        else:
            raise AssertionError("no error")
        finally:
            self.worker.plan = None

    def _check_error(self, error: Exception, failure: Failure | None) -> None:
        """A pass ends in the right error, and leaves gradients as they were."""
        if failure is None:
            right = isinstance(error, MismatchError)
        elif failure.how == "raise":
            right = isinstance(error, PlannedError | CommError)
        else:
            place = failure.places[self.worker.rank]
            named = [place] if place is not None else [other for other in failure.places if other is not None]
            right = any(repr(other.name) in str(error) for other in named)
            right = right and isinstance(error, AbortedError) is (place is None)
        if not right or isinstance(error, CommTimeoutError):
            raise error
        self._check_held(error)

    def _check_held(self, error: Exception) -> None:
        before, now = self.worker.before, self.worker.held()
        for name in before.keys() | now.keys():
            if name not in before or name not in now or not _same(now[name], before[name]):
                kind, was, found = type(error).__name__, _short(before.get(name)), _short(now.get(name))
                message = f"a pass that raised {kind} left p.grad of {name} at {found} in place of {was}"
                raise AssertionError(message) from error
        if self.worker.memory.holding() != self.worker.own:
            raise AssertionError(f"a pass that raised {type(error).__name__} has replaced a p.grad") from error

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
            except (RuntimeError, AssertionError):
                # Torch asserts that gradients have no graph.
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
            self.outcome.records.append(recorded(self.worker))
        else:
            self.outcome.change = "error" if mine or isinstance(error, CommError) else f"{error!r}"


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) or torch.allclose(one, other, 0, 0, equal_nan=True)


def _short(grad: torch.Tensor | None) -> str:
    return "None" if grad is None else short(grad)
