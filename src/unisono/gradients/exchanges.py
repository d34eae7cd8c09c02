"""Exchanges of a model's fragments over one communicator: the common base class, and exchanges at scheduled steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from unisono.comm.equal_tensors import tensor_hash
from unisono.communicator import Communicator, engine_of
from unisono.compression.codec import Codec
from unisono.core.staging import current_streams, entered, wait_for
from unisono.core.threads import SerialWorker
from unisono.core.work import Completion
from unisono.errors import CommError
from unisono.gradients.anchor import Anchor
from unisono.gradients.exchange import Ahead, Exchange, Fragment, Share
from unisono.gradients.periodic import Schedule, compare
from unisono.gradients.weights import ErrorContext
from unisono.utils.flatten import buckets, flat_apply

__all__ = ["ExchangeSettings", "Exchanges", "Reduction", "StepExchanges", "Tensors"]

_CALLS = 4
"""Maximum number of collectives for averaging one message; the communicator's timeout applies to each of them."""

Tensors = Callable[[Fragment], list[torch.Tensor]]
"""Function that takes a fragment and returns its current parameters."""


class Reduction(Protocol):
    """In-place reduction of one flat message over the ranks. All ranks must use the same function."""

    def __call__(self, flat: torch.Tensor, comm: Communicator, turn: int, /) -> object: ...


@dataclass(frozen=True)
class ExchangeSettings:
    """How fragments are exchanged; arguments of `PeriodicAverager`.

    Attributes:
        lag: Number of steps that training takes between sending a fragment and applying the result.
        alpha: Weight of this rank's own parameters when they are mixed with a result; None for no mixing.
        reduce: The reduction.
        cap: Maximum message size in bytes.
    """

    lag: int
    alpha: float | None
    reduce: Reduction
    cap: int


class Exchanges(ABC):
    """Exchanges of fragments over one communicator. A different communicator needs a new object.

    Everything except the reduction runs in the thread that owns the fragments: the training thread, unless a subclass
    documents another owner.

    Args:
        owner: Name of the averager's class.
        comm: A dedicated communicator.
        fragments: The fragments.
        anchor: None if the parameters themselves are averaged.
        settings: How fragments are exchanged.
        grace_s: Seconds that an exchange may take beyond the timeouts of its collectives.

    Attributes:
        end: Function that stops the worker thread without acquiring a lock, because a finalizer may call it. The
            function holds no reference to this object.
        error: The first error raised by an exchange, or while the anchor or the parameters were being changed; once it
            is set, no exchange begins.
    """

    _event = "an exchange"
    """Where an error was raised, for the other ranks' error message."""

    def __init__(
        self,
        owner: str,
        comm: Communicator,
        fragments: Sequence[Fragment],
        anchor: Anchor | None,
        settings: ExchangeSettings,
        grace_s: float = 0.0,
    ) -> None:
        self.error: BaseException | None = None
        self._owner = owner
        self._comm = comm
        self._fragments = fragments
        self._anchor = anchor
        self._settings = settings
        # Allow time for all fragments: an exchange may be queued behind the exchanges of all other fragments.
        self._limit_s = (_CALLS * engine_of(comm).options.timeout_s + grace_s) * len(fragments)
        self._worker = SerialWorker(f"unisono {owner} rank {comm.rank}")
        self.end: Callable[[], None] = self._worker.end

    def joiner(self) -> Callable[[], None]:
        """Return a function that stops the worker thread after its last exchange, and waits until it has exited.

        The function holds no reference to this object: the communicator stores the function until it closes, and would
        otherwise keep the object alive.
        """
        return partial(_join, self.end, self._worker, self._limit_s)

    def check(self) -> None:
        """If an exchange has failed, raise the error of the first failed exchange."""
        if self.error is not None:
            raise self.error

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Context for changes to fragments, anchor and parameters, so that nothing uses incomplete changes.

        After an error or an interrupt (Ctrl-C) in this context, no rank averages again until `move_to`: this rank could
        otherwise continue with an incomplete change, or wait in a different exchange than the other ranks. Blocking
        waits stay outside the context, where an interrupt is harmless.
        """
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Make all later calls raise, on all ranks."""
        if not isinstance(error, CommError):
            self._comm.abort(f"{self._owner} of rank {self._comm.rank} has failed in {self._event}: {error!r}")
        # If the error is an interrupt, store the communicator's failure instead: programs would mistake an interrupt
        # that later calls raise for a second Ctrl-C.
        self.error = self.error or (error if isinstance(error, Exception) else self._comm.exception())

    # -- when fragments are exchanged -----------------------------------------------------------
    @abstractmethod
    def step(self, step: int, samples: int, tensors: Tensors) -> bool:
        """Send the fragments and apply the results that are due after a step; return whether any result was applied."""

    @abstractmethod
    def exchange_all(self, step: int, tensors: Tensors) -> None:
        """Exchange all fragments now, and replace the parameters with the results, without mixing (see `alpha`)."""

    @abstractmethod
    def finish(self, step: int, tensors: Tensors) -> None:
        """Wait for the exchanges in flight, apply their results, and average the changes that were not sent yet."""

    def held(self) -> AbstractContextManager[object]:
        """Return a context in which the calling thread owns the fragments."""
        return nullcontext()

    def check_between(self) -> None:
        """Raise `RuntimeError` if training cannot be resumed from the fragments' current state."""

    # -- an exchange ---------------------------------------------------------------------------
    def _contribution(self, fragment: Fragment, here: list[torch.Tensor], *, in_place: bool) -> list[torch.Tensor]:
        if not fragment.anchor:
            # Reduce a copy if training continues during the exchange, or if the result is mixed with the parameters.
            return here if in_place else [p.clone() for p in here]
        # Round the anchor to the parameter's dtype before subtracting: training started from the rounded values, so the
        # rounding must not count as a change.
        return [a.to(p.dtype).to(a.dtype) - p.to(a.dtype) for a, p in zip(fragment.anchor, here, strict=True)]

    def _begin(
        self,
        fragment: Fragment,
        here: list[torch.Tensor],
        step: int,
        lag: int,
        alpha: float | None,
        *,
        share: Share | None = None,
        is_last: bool = False,
    ) -> Exchange:
        """Return a new exchange of a fragment, given its parameters; `_task` returns the task that sends it."""
        # Look for failures before the prediction replaces the parameters, because this replacement can be undone only
        # if the exchange has begun.
        self.check()
        if (failure := self._comm.exception()) is not None:
            raise failure.locate(rank=self._comm.rank, size=self._comm.size, operation="all_reduce")
        in_place = self._anchor is None and not lag and not alpha
        given = self._contribution(fragment, here, in_place=in_place)
        ahead = None
        if lag and alpha is None:
            if self._anchor is None:
                ahead = Ahead([p.clone() for p in here])
            else:
                # Copy the contribution, because the reduction overwrites it.
                own = [change.clone() for change in given]
                ahead = Ahead(self._anchor.look_ahead(fragment.anchor, here, own), own)
        return Exchange(step + lag, given, self._completion(given), alpha, in_place, is_last, ahead, share)

    def _completion(self, given: list[torch.Tensor]) -> Completion:
        return Completion(self._limit_s * len(list(buckets(given, self._settings.cap))))

    def _task(self, fragment: Fragment, exchange: Exchange, step: int | None, *, aside: bool) -> Callable[[], None]:
        """Return the task that reduces a new exchange; the task never raises.

        Args:
            fragment: The fragment to exchange.
            exchange: The exchange.
            step: The current step, if all ranks are at the same step.
            aside: Whether another thread will run the task.
        """
        # Another thread reduces on dedicated streams, which wait for the work queued so far, so that the reduction
        # neither reads a tensor too early nor delays the work that training queues later.
        streams = current_streams(t.device for t in exchange.tensors) if aside else []
        exchange.streams = [torch.Stream(device=stream.device) for stream in streams]
        # Read the fragment's fields in this thread, because the thread that runs the task must not access them.
        state = {
            "rounds": fragment.rounds,
            "steps": step,
            "digests of what was loaded": [tensor_hash(a).item() for a in fragment.anchor if fragment.is_loaded],
        }
        fragment.is_loaded = False
        return partial(self._run, fragment, exchange, streams, state)

    def _run(
        self, fragment: Fragment, exchange: Exchange, after: Sequence[torch.Stream], state: Mapping[str, object]
    ) -> None:
        """Reduce the contributions of an exchange, after the work already queued on the streams."""
        error: BaseException | None = None
        what = f"averaging fragment {self._fragments.index(fragment)}, whose result is for step {exchange.due}"
        try:
            with torch.no_grad(), ErrorContext(what), entered(exchange.streams):
                wait_for(after)
                self._compare(state)
                self._reduce(fragment, exchange)
        except BaseException as raised:
            error = raised
            # Discard the values that `_compare` has left pending: otherwise, this thread's next collective on another
            # communicator of the same ranks would compare them.
            engine_of(self._comm).agreements.take(0)
            self._fail(raised)
        finally:
            exchange.done.complete(error)

    def _compare(self, state: Mapping[str, object]) -> None:
        """Have the next collective check that all ranks have the same `state`."""
        compare(self._comm, state, self._owner)

    def _reduce(self, fragment: Fragment, exchange: Exchange) -> None:
        """Reduce the contributions of an exchange, one message after another."""
        for index, message in enumerate(buckets(exchange.tensors, self._settings.cap)):
            codec = fragment.codecs[index] if fragment.codecs else None
            shapes = [t.shape for t in message]
            reduce = partial(self._reduce_message, codec, shapes, fragment.rounds)
            # A collective that fails leaves partial sums behind, which must not end up in the parameters.
            flat_apply(message, reduce, keep_on_error=exchange.in_place)

    def _reduce_message(self, codec: Codec | None, shapes: list[torch.Size], turn: int, memory: torch.Tensor) -> None:
        flat = memory.detach().view(-1)
        if codec is None:
            self._settings.reduce(flat, self._comm, turn)
        else:
            codec.average(flat, self._comm, shapes)

    # -- the result of an exchange -------------------------------------------------------------
    def apply(self, fragment: Fragment, tensors: Tensors | None) -> bool:
        """Wait for a fragment's exchange, and apply the result; return False if none is in flight.

        Args:
            fragment: The fragment.
            tensors: See `Tensors`; None to update the anchor only.
        """
        exchange = fragment.exchange
        if exchange is None:
            return False
        exchange.wait()
        with self.changing():
            fragment.exchange = None
            self._step_anchor(fragment, exchange)
            if tensors is not None and not exchange.in_place:
                self._update(fragment, exchange, tensors(fragment))
            # Count the round last: if this rank fails before this line, its count stays lower, and so `move_to` gives
            # it the anchor of a rank that did not fail.
            fragment.rounds += 1
        return True

    def _step_anchor(self, fragment: Fragment, exchange: Exchange) -> None:
        """Update the fragment's part of the anchor with the result of an exchange."""
        share = exchange.share
        if self._anchor is None or (share is not None and not share.of_all):
            return
        kept = [i for i in range(len(exchange.tensors)) if i not in exchange.loaded]
        part = [fragment.anchor[i] for i in kept]
        changes = [exchange.tensors[i] for i in kept]
        # Don't take an outer step for the last exchange: the outer optimizer would move the anchor by its momentum,
        # which is meant for a whole interval. In three training runs of 1,000 steps, an outer step at the end made the
        # loss 6 % worse.
        if exchange.is_last:
            for there, change in zip(part, changes, strict=True):
                there.sub_(change)
        elif kept:
            self._anchor.step(part, changes, share.rates if share is not None else ())

    def _update(self, fragment: Fragment, exchange: Exchange, parameters: list[torch.Tensor]) -> None:
        """Update the parameters with the result of an exchange."""
        results = exchange.tensors if self._anchor is None else fragment.anchor
        ahead = exchange.ahead
        for index, (here, there) in enumerate(zip(parameters, results, strict=True)):
            if index in exchange.loaded:
                continue
            if ahead is not None:
                # Update the parameter in place, because `here + (there - expected)` would need two more copies of the
                # fragment.
                here.sub_(ahead.expected[index]).add_(there)
            else:
                here.copy_(torch.lerp(there, here.to(there.dtype), exchange.alpha) if exchange.alpha else there)
        if ahead is None and not exchange.alpha and not exchange.loaded:
            # The parameters equal the anchor again, so restart the count of samples for the next contribution.
            fragment.samples = 0

    def _apply_due(self, step: int, tensors: Tensors) -> bool:
        """Apply the results that are due after a step; return whether there were any."""
        applied = False
        for fragment in self._fragments:
            if fragment.exchange is not None and fragment.exchange.due <= step:
                applied |= self.apply(fragment, tensors)
        return applied


class StepExchanges(Exchanges):
    """Exchanges at steps that a schedule selects, so that all ranks use the same order without exchanging a message.

    If results may be applied in a later step, a worker thread runs the exchanges in the scheduled order; otherwise the
    training thread does.

    Args:
        owner, comm, fragments, anchor, settings: As for `Exchanges`.
        schedules: For each fragment, a predicate that takes a step and returns whether to send the fragment after that
            step.
    """

    def __init__(
        self,
        owner: str,
        comm: Communicator,
        fragments: Sequence[Fragment],
        anchor: Anchor | None,
        settings: ExchangeSettings,
        schedules: Sequence[Schedule],
    ) -> None:
        super().__init__(owner, comm, fragments, anchor, settings)
        self._schedules = schedules
        if settings.lag:
            comm.allow_any_thread()

    def step(self, step: int, samples: int, tensors: Tensors) -> bool:
        applied = False
        # An interrupt must not make this rank skip a fragment that other ranks send in this step.
        with self.changing():
            for fragment, schedule in zip(self._fragments, self._schedules, strict=True):
                if schedule(step):
                    # Apply the fragment's previous result first, even if it is not due yet.
                    applied |= self.apply(fragment, tensors)
                    self._exchange(fragment, step, self._settings.lag, self._settings.alpha, tensors)
        return self._apply_due(step, tensors) or applied

    def _exchange(
        self,
        fragment: Fragment,
        step: int,
        lag: int,
        alpha: float | None,
        tensors: Tensors,
        *,
        is_last: bool = False,
    ) -> None:
        exchange = self._begin(fragment, tensors(fragment), step, lag, alpha, is_last=is_last)
        task = self._task(fragment, exchange, step, aside=lag > 0)
        if lag > 0:
            self._worker.run(task)
        else:
            task()
            # Wait here, so that an error, and above all an interrupt, is raised now and not by a later wait.
            exchange.wait()
        # Set `fragment.exchange` last, because `apply` must not wait for an exchange that was never started.
        fragment.exchange = exchange

    def finish(self, step: int, tensors: Tensors) -> None:
        for fragment in self._fragments:
            self.apply(fragment, tensors)
        if self._anchor is not None:
            self.exchange_all(step, tensors, is_last=True)

    def exchange_all(self, step: int, tensors: Tensors, *, is_last: bool = False) -> None:
        # First finish the exchanges that the worker still runs: the exchanges below run in this thread, and would
        # otherwise overtake them.
        for fragment in self._fragments:
            self.apply(fragment, tensors)
        with self.changing():
            for fragment in self._fragments:
                self._exchange(fragment, step, 0, None, tensors, is_last=is_last)
                self.apply(fragment, tensors)


def _join(end: Callable[[], None], worker: SerialWorker, limit_s: float) -> None:
    end()
    worker.join(limit_s)
