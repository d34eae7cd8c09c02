"""Timed exchanges (turns) between ranks of different speeds. Turns begin at set times, not at set steps."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch

from unisono.communicator import Communicator, engine_of
from unisono.core import clock
from unisono.core.threads import SerialWorker
from unisono.gradients.anchor import Anchor
from unisono.gradients.exchange import Exchange, Fragment, Share
from unisono.gradients.exchanges import Exchanges, ExchangeSettings, Tensors

__all__ = ["Turns"]

_log = logging.getLogger("unisono")


@dataclass(eq=False)
class _Interval:
    """State of the turns from the first step (or the first step after `finish`) until all ranks have called `finish`.

    Only the worker writes `due_s`, `left` and `is_over`, and it does so before it completes the exchange `last`. So
    once a thread has seen that `last` is complete, `due_s`, `left` and `is_over` do not change until the next exchange.

    Attributes:
        due_s: Time at which the current turn begins.
        left: Number of consecutive turns to which all ranks contributed from `finish`.
        is_over: Whether all ranks have left.
        last: The latest exchange.
        step: The step that training has reached.
    """

    due_s: float
    left: int = 0
    is_over: bool = False
    last: Exchange | None = None
    step: int = 0

    def is_due(self) -> bool:
        """Return whether the turn has begun and this rank has not contributed to it yet."""
        return (self.last is None or self.last.done.is_completed()) and clock.now() >= self.due_s


class Turns(Exchanges):
    """Exchanges of fragments at set times (turns), one fragment per turn, between ranks that run at different speeds.

    A turn begins one interval after the previous turn. In a turn's exchange, ranks learn how late the last rank joined,
    and derive the time at which the turn began, without comparing clocks. The training thread contributes to a turn at
    the end of a step. If the training thread does not contribute within `max_lag_s`, the worker thread contributes
    zeros with zero weight in its place, so that no rank has to wait.

    There are two threads:

    - Only the worker advances from one turn to the next. In each turn, the worker waits for the training thread's
      contribution until the turn must proceed, runs the exchange, and then schedules the next turn.
    - The fragments, the anchor and its optimizer belong to the thread that holds the lock. The training thread acquires
      the lock when it enters a method, and releases the lock on return. The worker acquires the lock only if the
      training thread is late, to step the anchor in the training thread's place. The worker never waits for the lock:
      if the training thread holds it, that thread is about to contribute. While the worker holds the lock, it waits for
      no other rank. So the training thread waits for at most one step of the anchor, and only if it was late.

    If a rank leaves or stalls during an exchange:

    - A rank that has called `finish` contributes its remaining samples, and then takes part in each turn until all
      ranks have called `finish` (each exchange reports which ranks have). Ranks that are still training are not
      affected.
    - If a rank dies or aborts, the communicator becomes unusable: the exchange in flight raises in the worker of every
      other rank, and the worker exits. On a rank whose worker has exited, the next `step` or `finish`, and every later
      call, raises the worker's error, which names the lost rank. The anchor keeps the result of the previous exchange.
      After `move_to`, the lost contribution is sent again on the new communicator.
    - A rank that is alive but stuck in a step has not left: its worker thread takes part instead of its training
      thread.

    Args:
        owner, comm, fragments, anchor, settings: As for `Exchanges`.
        interval_s: Seconds from one turn to the next.
        max_lag_s: Seconds from the beginning of a turn until it proceeds without this rank's contribution.
    """

    _event = "a turn"
    _anchor: Anchor

    def __init__(
        self,
        owner: str,
        comm: Communicator,
        fragments: Sequence[Fragment],
        anchor: Anchor,
        settings: ExchangeSettings,
        interval_s: float,
        max_lag_s: float,
    ) -> None:
        super().__init__(owner, comm, fragments, anchor, settings, interval_s + max_lag_s)
        self._interval_s = interval_s
        self._max_lag_s = max_lag_s
        # Number of the current turn; only the worker changes it.
        self._number = 0
        self._interval: _Interval | None = None
        self._contributions: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.end = partial(_end, self._contributions, self._worker)
        self._lock = threading.Lock()
        comm.allow_any_thread()

    # -- the training thread -------------------------------------------------------------------
    def held(self) -> AbstractContextManager[object]:
        # Don't write this as a generator: an interrupt could end it after it has acquired the lock, but before its
        # `try`.
        return self._lock

    def step(self, step: int, samples: int, tensors: Tensors) -> bool:
        with self.held():
            for fragment in self._fragments:
                fragment.samples += samples
            interval = self._begun(step)
            applied = False
            if interval.is_due():
                fragment = self._in_turn
                applied = self.apply(fragment, tensors)
                self._contribute(interval, fragment, self._settings.lag, self._settings.alpha, tensors)
            return self._apply_due(step, tensors) or applied

    def finish(self, step: int, tensors: Tensors) -> None:
        with self.held():
            interval = self._begun(step)
            if interval.last is not None:
                # The next turn's fragment and time are unknown until the current exchange has completed.
                interval.last.done.wait()
            while not interval.is_over:
                fragment = self._in_turn
                self.apply(fragment, tensors)
                # Contribute before the turn is due, because this rank has nothing else to do; its worker waits for the
                # other ranks.
                self._contribute(interval, fragment, 0, None, tensors, leaving=True)
                self.apply(fragment, tensors)
            self._interval = None
            for fragment in self._fragments:
                self.apply(fragment, tensors)

    exchange_all = finish

    def check_between(self) -> None:
        if self._interval is not None:
            raise RuntimeError("ranks are inside of an interval. Call finish() on all ranks: they are equal after it")

    def _begun(self, step: int) -> _Interval:
        """Return the current interval; begin one now if there is none."""
        if self._interval is None:
            with self.changing():
                self._interval = _Interval(clock.now() + self._interval_s)
                self._worker.run(partial(self._take_turns, self._interval))
        self._interval.step = step
        return self._interval

    @property
    def _in_turn(self) -> Fragment:
        """The fragment that is exchanged in the current turn."""
        return self._fragments[self._number % len(self._fragments)]

    def _contribute(
        self,
        interval: _Interval,
        fragment: Fragment,
        lag: int,
        alpha: float | None,
        tensors: Tensors,
        *,
        leaving: bool = False,
    ) -> None:
        """Pass this rank's contribution to the worker."""
        share = Share(fragment.samples, leaving, max(0.0, clock.now() - interval.due_s), self._anchor.rates)
        with self.changing():
            exchange = self._begin(fragment, tensors(fragment), interval.step, lag, alpha, share=share)
            fragment.samples = 0
            self._contributions.put(self._started(interval, fragment, exchange))

    def _started(self, interval: _Interval, fragment: Fragment, exchange: Exchange) -> Callable[[], None]:
        """Assign an exchange to the fragment, and return the task that runs the exchange."""
        # Pass None, so that steps are not compared: ranks that run at different speeds are at different steps.
        task = self._task(fragment, exchange, None, aside=True)
        fragment.exchange = exchange
        interval.last = exchange
        return task

    # -- the worker ----------------------------------------------------------------------------
    @torch.no_grad()
    def _take_turns(self, interval: _Interval) -> None:
        try:
            while not interval.is_over and self.error is None:
                task = self._next(interval)
                if task is None:
                    return
                task()
                # Drop the task, so that its tensors do not stay alive until the next turn.
                del task
        except BaseException as raised:
            # The error may come from the outer optimizer, for example in a turn to which training did not contribute in
            # time. The next training step raises the error.
            self._fail(raised)

    def _next(self, interval: _Interval) -> Callable[[], None] | None:
        """Wait for training's contribution, or take part without it. Return the task, or None to stop the worker."""
        late_s = interval.due_s + self._max_lag_s
        while True:
            try:
                return self._contributions.get(timeout=max(0.0, late_s - clock.now()))
            except queue.Empty:
                if clock.now() < late_s:
                    # Wait again: the timeout has elapsed in real time, but not on the library's clock, which was
                    # stopped for a while.
                    continue
            if not self._lock.acquire(blocking=False):
                # Wait longer: the training thread is in `step` or `finish`, and about to contribute.
                late_s = clock.now() + self._max_lag_s
                continue
            try:
                # Training may have contributed since the wait timed out. While this thread holds the lock, training
                # cannot contribute.
                return self._contributions.get_nowait() if not self._contributions.empty() else self._miss(interval)
            finally:
                self._lock.release()

    def _miss(self, interval: _Interval) -> Callable[[], None]:
        """Take part without a contribution, because the training thread did not finish a step in time."""
        fragment = self._in_turn
        # If training has not applied this fragment's previous result yet, apply it to the anchor now.
        self.apply(fragment, None)
        fragment.missed += 1
        _log.warning(
            "rank %d was more than %g s late for exchange %d: its latest %g samples do not count",
            self._comm.rank,
            self._max_lag_s,
            self._number,
            fragment.samples,
        )
        share = Share(0, False, max(0.0, clock.now() - interval.due_s), self._anchor.rates)
        nothing = [torch.zeros_like(there) for there in fragment.anchor]
        # Make the result due immediately: the training thread applies it after its next step, and continues from the
        # anchor.
        exchange = Exchange(interval.step, nothing, self._completion(nothing), None, share=share)
        return self._started(interval, fragment, exchange)

    def _reduce(self, fragment: Fragment, exchange: Exchange) -> None:
        interval = self._interval
        share = exchange.share
        assert interval is not None
        assert share is not None
        behind_s = self._weigh(interval, exchange.tensors, share)
        # The last rank has joined now, `behind_s` seconds after the turn began.
        began_s = clock.now() - behind_s
        if share.of_all:
            super()._reduce(fragment, exchange)
        # Update the turn before the exchange completes, because training may contribute to the next turn as soon as the
        # exchange has completed.
        self._number += 1
        interval.due_s = max(began_s + self._interval_s, clock.now())
        # The exchanges are over once each fragment has been exchanged in a turn in which all ranks were leaving.
        interval.is_over = interval.left >= len(self._fragments)

    def _weigh(self, interval: _Interval, tensors: Sequence[torch.Tensor], share: Share) -> float:
        """Scale the contribution by its share of all samples; agree on which ranks are leaving, and on learning rates.

        Returns: The largest delay with which any rank joined the turn, in seconds.
        """
        fields = [share.samples, share.leaving, share.behind_s, *share.rates]
        mine = torch.tensor(fields, dtype=torch.float64, device=self._comm.device)
        everyone = mine.new_empty(self._comm.size * mine.numel())
        # Allow extra time: a leaving rank contributes before the turn is due, and waits for the other ranks here.
        limit_s = engine_of(self._comm).options.timeout_s + self._interval_s + self._max_lag_s
        self._comm.all_gather_single(everyone, mine, timeout=limit_s)
        rows: list[list[float]] = everyone.view(self._comm.size, -1).tolist()
        interval.left = interval.left + 1 if all(row[1] for row in rows) else 0
        share.of_all = sum(row[0] for row in rows)
        # A late rank may be at a different point in its learning rate schedule, so all ranks use the learning rates of
        # the first rank that was on time.
        share.rates = next((row[3:] for row in rows if row[0]), share.rates)
        for tensor in tensors if share.of_all else ():
            tensor.mul_(share.samples * self._comm.size / share.of_all)
        return max(row[2] for row in rows)


def _end(contributions: queue.SimpleQueue[Callable[[], None] | None], worker: SerialWorker) -> None:
    contributions.put(None)
    worker.end()
