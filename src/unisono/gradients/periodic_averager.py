"""The engine of periodic averaging: fragments that are sent when due, a reduction, and an update."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import chain
from threading import Condition, Timer
from typing import Any, Protocol, TypedDict, cast
from weakref import finalize, ref

import torch

from unisono.comm.equal_tensors import assert_equal_tensors, tensor_hash
from unisono.communicator import Communicator, engine_of
from unisono.compression.codec import Codec, Spec
from unisono.core.load_hook import follow_loads
from unisono.core.staging import current_streams, entered, wait_for
from unisono.core.threads import SerialWorker
from unisono.core.types import Timeout
from unisono.core.work import Completion, positive_timeout
from unisono.gradients.buckets import codec_for
from unisono.gradients.periodic import PeriodicAction, PeriodicSchedule, Schedule, schedule_of, whole_number
from unisono.gradients.robust import ClippedMean, TrimmedMean
from unisono.gradients.weights import ErrorContext
from unisono.utils.flatten import MIB, buckets, flat_apply
from unisono.utils.parameters import Model, Named, check_parameters, named_tensors

__all__ = ["ExchangeOptions", "Fragment", "Outer", "PeriodicAverager", "Reduction", "floating", "mean"]

_log = logging.getLogger("unisono")

_CALLS = 4
"""Largest number of collectives in the average of one message; each has the communicator's timeout."""

Outer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
"""Factory of an outer optimizer, from the anchor's tensors."""


class Reduction(Protocol):
    """Reduction of one flat message over the ranks, in place; the same function on all ranks."""

    def __call__(self, flat: torch.Tensor, comm: Communicator, turn: int, /) -> object: ...


class ExchangeOptions(TypedDict, total=False):
    """Arguments of `PeriodicAverager` that `DiLoCo` and others pass on."""

    fragments: int | Sequence[Sequence[str]]
    reduce: str | Reduction
    compression: Spec | None
    overlap_steps: int
    max_lag: Timeout | None
    alpha: float | None
    anchor_dtype: torch.dtype | None
    bucket_cap_mb: float


def mean(flat: torch.Tensor, comm: Communicator, turn: int, /) -> None:
    """Reduction to the mean over all ranks."""
    comm.all_reduce(flat, "avg")


_REDUCTIONS: dict[str, Reduction] = {
    "clipped_mean": ClippedMean(),
    "mean": mean,
    "median": TrimmedMean(None),
    "trimmed_mean": TrimmedMean(),
}


@dataclass(eq=False)
class _PendingExchange:
    """An exchange in flight: this rank's contributions, which become the result.

    Attributes:
        due: The step in which the result is applied.
        tensors: One for each parameter of the fragment.
        done: Completed by the thread that reduces.
        alpha: As for `PeriodicAverager`.
        in_place: Whether the contributions are the parameters themselves, so that there is nothing to apply.
        expected: The predicted parameters that training continued from, if their change since then is added to the
            result.
        own: With an outer optimizer and `expected`: a copy of this rank's contributions, in case the exchange is
            repeated.
        streams: Streams of accelerators on which the result is computed.
        samples: With turns: weight of this rank's contribution; 0 if it is late.
        of_all: Total weight of all ranks; if it is 0 there is no result.
        behind_s: Time from the start of the turn until this rank took it.
        leaving: Whether this rank has nothing more to contribute.
        rates: Learning rates of the outer optimizer, one for each parameter group.
        is_last: Whether the anchor moves by the mean change, without the outer optimizer.
        is_dropped: Whether the result has no effect, because the model was loaded meanwhile.
    """

    due: int
    tensors: list[torch.Tensor]
    done: Completion
    alpha: float | None
    in_place: bool = False
    expected: list[torch.Tensor] | None = None
    own: list[torch.Tensor] = field(default_factory=list)
    streams: list[torch.Stream] = field(default_factory=list)
    samples: float = 0
    of_all: float = 1
    behind_s: float = 0
    leaving: bool = False
    rates: list[float] = field(default_factory=list)
    is_last: bool = False
    is_dropped: bool = False


@dataclass(eq=False)
class _Turns:
    """Schedule by which ranks of different speed exchange one fragment after another.

    A turn begins one interval after the previous one, as agreed in each exchange. A rank that has nothing to send
    `max_lag_s` later takes part without a contribution, so that nobody waits for it.

    Attributes:
        interval_s, max_lag_s: In seconds.
        number: Number of the turn.
        due_s: Start of the turn; infinite during an exchange, None while turns are off.
        late: Timer that runs when the turn is missed.
        leaving: Whether this rank waits for the others in `finish`.
        left: Number of consecutive turns in which all ranks were leaving.
    """

    interval_s: float
    max_lag_s: float
    number: int = 0
    due_s: float | None = None
    late: Timer | None = None
    leaving: bool = False
    left: int = 0

    def is_due(self) -> bool:
        """Return whether the turn has begun."""
        return self.due_s is not None and time.monotonic() >= self.due_s

    def begin(self, last_s: float, expire: Callable[[int], None]) -> None:
        """Schedule the next turn one interval after the previous one, or immediately if that is past."""
        self.due_s = max(last_s + self.interval_s, time.monotonic())
        self.late = Timer(self.due_s + self.max_lag_s - time.monotonic(), expire, [self.number])
        self.late.daemon = True
        self.late.start()

    def take(self) -> float:
        """Take the turn: schedule none during its exchange. Return how late it is taken, in seconds."""
        behind_s = 0.0 if self.due_s is None else max(0.0, time.monotonic() - self.due_s)
        self.end()
        self.due_s = math.inf
        return behind_s

    def end(self) -> None:
        """Turn the schedule off."""
        self.due_s = None
        if self.late is not None:
            self.late.cancel()


@dataclass(eq=False)
class Fragment:
    """Parameters that are exchanged together.

    Attributes:
        members: Their indices among the floating-point parameters.
        due: Predicate of the step: whether they are sent after it.
        anchor: Their part of the anchor, if there is one.
        codecs: One for each message; None for an uncompressed one.
        rounds: Number of exchanges applied.
        samples: Number of samples that this rank has trained on since its last contribution.
        exchange: The exchange in flight.
        is_loaded: Whether this rank has loaded the anchor since the last exchange; ranks then compare it.
    """

    members: list[int]
    due: Schedule
    anchor: list[torch.Tensor]
    codecs: list[Codec | None] = field(default_factory=list)
    rounds: int = 0
    samples: float = 0
    exchange: _PendingExchange | None = None
    is_loaded: bool = False


class PeriodicAverager(PeriodicAction):
    """Engine of periodic averaging; `LocalSGD`, `DiLoCo` and `Gossip` are configurations of it.

    Provisional: it may change in any minor version, without a deprecation.

    Ranks train independently. When a fragment of the parameters is due, this rank's contribution is sent and reduced,
    and the result is applied `overlap_steps` steps later. Without `outer`, the parameters themselves are averaged. With
    `outer`, the contribution is the change from a common anchor; the outer optimizer steps the anchor with the mean
    change as its gradient, and ranks continue from there. Construction is collective, and so is each `step` in which a
    fragment is due or applied.

    A module may load other weights at any time, on all ranks: with `load_state_dict` (also of a submodule, or with
    `assign=True`), from a checkpoint, or with `un.broadcast_parameters`. The loaded weights become the anchor, momentum
    is reset, and results in flight are dropped. All other changes of values count as training. Names and shapes of
    parameters must not change, nor, with `outer`, the parameter objects.

    Args:
        model: A module, or its parameters. Integer ones stay unchanged. Loads into a list or a ScriptModule are not
            noticed.
        comm: The ranks that take part.
        every: A number of steps, an `every(...)`, or a function of the step's number (from 1). Or a `timedelta`, for
            ranks of different speed: each takes as many steps as it can in that time, and its contribution counts by
            its number of samples. Needs `outer`, and `reduce="mean"`.
        buffers: Also average a module's floating-point buffers.
        outer: Factory of the outer optimizer, from the anchor's tensors. Ranks must then start from equal parameters.
        fragments: Number of parts of about equal bytes, in the order of the parameters; or for each part a list of
            names, of parameters or of modules that hold them ("layers.3"). Part k of p is sent k / p of an interval
            after part 0 (Douillard et al., Streaming DiLoCo, 2025). More than one needs `every` to be a number of
            steps.
        reduce: "mean", "trimmed_mean", "median", "clipped_mean" (see `TrimmedMean`, `ClippedMean`); or a function of a
            flat tensor that it changes in place, a communicator, and the number of the fragment's exchange (from 0).
            With `outer`, its result must be the same on all ranks.
        compression: A codec of `un.compression`, which computes the mean; needs `outer`. Complex parameters are sent as
            they are.
        overlap_steps: Number of steps that training continues before it applies a result, at most until the fragment is
            due again. 0: wait for each exchange.
        max_lag: With a `timedelta`: seconds, or a timedelta, that an exchange waits for a late rank. After that it
            proceeds without this rank's contribution, and the rank continues from the anchor after its next step. None:
            the time between exchanges.
        alpha: Share of this rank's own parameters when a result is applied, from 0 to less than 1; Streaming DiLoCo has
            0.5. None: training continues from a predicted result, as if all ranks sent what this one does, and the
            difference is added when the true result arrives (after Kale et al., Eager updates, 2025), so that lag costs
            less loss. `outer` then steps twice, once to predict.
        anchor_dtype: Dtype of the anchor's real tensors. None: float32, or the parameter's dtype if that is wider.
        bucket_cap_mb: Size of a message in MiB.
        settings: Other values that must be the same on all ranks, by name.

    Raises:
        MismatchError: Ranks have different parameters or arguments. From an exchange, on every rank: they have taken
            different numbers of steps (without a `timedelta`), resumed from different ones, or loaded different
            weights.
        RuntimeError: From an exchange: a parameter was added, removed or replaced, or its shape has changed.
        ValueError: An argument is out of range or incompatible with others; nothing was sent.
        TypeError: A number of steps or of fragments is not an int.

    Attributes:
        anchor: With `outer`, for each floating-point parameter its value when all ranks were last equal; else empty.
        outer: The outer optimizer; its learning rate may be scheduled like any other.
        missed: With a `timedelta`: number of exchanges without this rank's contribution because it was late. Each is
            logged as a warning on the logger "unisono".

    Cost: each interval one average of the parameters' elements, in the anchor's dtype if there is one; with a
    `timedelta` also a gather of about 24 bytes a rank. Memory: with `outer` the anchor, the outer optimizer's state,
    and a copy of the fragments in flight; with `overlap_steps` and without `alpha` two more copies of these.

    Example:
        >>> def program(comm):
        ...     w = torch.zeros(1)
        ...     averager = un.gradients.PeriodicAverager([w], comm, every=2, overlap_steps=1)
        ...     seen = []
        ...     for _ in range(4):
        ...         w += 1.0 + comm.rank
        ...         averager.step()
        ...         seen.append(w.item())
        ...     averager.finish()
        ...     return [*seen, w.item()]
        >>> un.launch(program, 2, "thread")
        [[1.0, 2.0, 4.0, 5.0, 6.0], [2.0, 4.0, 5.0, 7.0, 6.0]]
    """

    def __init__(
        self,
        model: Model,
        comm: Communicator,
        every: int | Schedule | timedelta = 8,
        *,
        buffers: bool = False,
        outer: Outer | None = None,
        fragments: int | Sequence[Sequence[str]] = 1,
        reduce: str | Reduction = "mean",
        compression: Spec | None = None,
        overlap_steps: int = 0,
        max_lag: Timeout | None = None,
        alpha: float | None = None,
        anchor_dtype: torch.dtype | None = None,
        bucket_cap_mb: float = 25,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        interval = every if isinstance(every, timedelta) else None
        schedule = schedule_of(1 if isinstance(every, timedelta) else every)
        if outer is None or reduce != "mean":
            # Both need an anchor, because they average changes from it.
            _refuse("compression=", compression)
            _refuse("every=timedelta(...)", interval)
        model = model if isinstance(model, torch.nn.Module) else named_tensors(model)
        self._known = named = floating(named_tensors(model, buffers=buffers))
        check_parameters(named)
        whole_number("overlap_steps", overlap_steps, 0)
        if alpha is not None and not 0 <= alpha < 1:
            raise ValueError(f"alpha must be None or from 0 to less than 1, not {alpha}")
        if interval is None and max_lag is not None:
            raise ValueError("max_lag= is for ranks of different speed: it needs a timedelta in every=")
        if anchor_dtype is not None and not anchor_dtype.is_floating_point:
            raise ValueError(f"anchor_dtype must be a dtype of real numbers, not {anchor_dtype}")
        self._lag = overlap_steps
        self._alpha = alpha
        self._reduce = _reduction(reduce)
        self._cap = int(bucket_cap_mb * MIB)
        self.anchor: list[torch.Tensor] = [_wide(t, anchor_dtype) for _, t in named] if outer is not None else []
        self.outer: torch.optim.Optimizer | None = None if outer is None else outer(self.anchor)
        codec = codec_for(compression)
        self._fragments: list[Fragment] = []
        for members, due in _divide(named, fragments, schedule):
            fragment = Fragment(members, due, [self.anchor[i] for i in members] if self.anchor else [])
            if codec is not None:
                messages = self._messages(fragment.anchor)
                fragment.codecs = [codec.clone() if m[0].is_floating_point() else None for m in messages]
            self._fragments.append(fragment)
        # Whether the anchor was loaded from a state of this averager; loading the model next must not replace it.
        self._resumed = False
        self._turns: _Turns | None = None
        if interval is not None:
            interval_s = positive_timeout(interval, "every") / len(self._fragments)
            max_lag_s = interval_s if max_lag is None else positive_timeout(max_lag, "max_lag")
            self._turns = _Turns(interval_s, max_lag_s)
        shared = {
            "interval": str(interval),
            "outer": _described(self.outer),
            "fragments": repr(fragments),
            "reduce": reduce if isinstance(reduce, str) else getattr(reduce, "__qualname__", repr(reduce)),
            "compression": repr(codec),
            "overlap_steps": overlap_steps,
            "max_lag": str(max_lag),
            "alpha": alpha,
            "anchor_dtype": str(anchor_dtype),
            "bucket_cap_mb": bucket_cap_mb,
        }
        # Held by training, the exchange thread, or a turn's timer while it changes fragments.
        self._lock = Condition()
        self.missed: int = 0
        super().__init__(model, comm, schedule, buffers=buffers, settings={**shared, **(settings or {})})
        try:
            if self.anchor:
                advice = "un.broadcast_parameters(model, comm) makes them equal"
                assert_equal_tensors(named, self._comm, "parameters differ between ranks", advice)
        except Exception:
            # Close the new communicator on any error, and raise the error again.
            self._comm.close()
            raise
        follow_loads(model, self, self._on_load)

    def _connect(self, comm: Communicator) -> None:
        super()._connect(comm)
        self._error: BaseException | None = None
        self._limit_s = _CALLS * engine_of(self._comm).options.timeout_s
        if self._turns is not None:
            self._limit_s += self._turns.interval_s + self._turns.max_lag_s
        self._worker = SerialWorker(f"unisono {type(self).__name__} rank {comm.rank}")
        self._comm.before_close(partial(_end, self._worker, self._turns, self._limit_s * len(self._fragments)))
        finalize(self, self._worker.end)
        if self._lag or self._turns is not None:
            self._comm.allow_any_thread()

    # -- steps ---------------------------------------------------------------------------------
    @property
    def rounds(self) -> int:
        """Number of intervals with all results applied."""
        return self._fragments[-1].rounds

    def step(self, samples: int | None = None) -> bool:
        """Count a step, send the fragments that are due, and apply the results that are. Call it after each step.

        Collective where a fragment is due or applied. With a `timedelta` no rank waits for another's step; ranks stop
        at the same number of `rounds`, or when they run out of samples, and then call `finish`.

        Args:
            samples: With a `timedelta` only: number of samples in this step, such as `len(batch)`. None is 1.

        Returns: Whether a result was applied.

        Raises:
            CommError: An exchange failed, perhaps one in the background; the notes say which. Every later step raises
                it again.
            TypeError: Samples were passed without a `timedelta`.
        """
        if samples is not None and self._turns is None:
            raise TypeError("samples weight the contributions of ranks of different speed: pass a timedelta in every=")
        if self._error is not None:
            raise self._error
        self.steps += 1
        self._resumed = False
        applied = False
        with torch.no_grad():
            with self._lock:
                for fragment in self._due(1 if samples is None else samples):
                    applied |= self._apply(fragment)
                    self._start(fragment, self._lag, self._alpha)
            for fragment in self._fragments:
                if fragment.exchange is not None and fragment.exchange.due <= self.steps:
                    applied |= self._apply(fragment)
        return applied

    def _due(self, samples: int) -> list[Fragment]:
        """Count the samples of a step, and return the fragments that are sent after it."""
        turns = self._turns
        if turns is None:
            return [fragment for fragment in self._fragments if fragment.due(self.steps)]
        for fragment in self._fragments:
            fragment.samples += samples
        if turns.due_s is None:
            self._begin_turn(time.monotonic())
        return [self._in_turn] if turns.is_due() else []

    def finish(self) -> None:
        """Complete the exchanges in flight and apply their results, at the end of training. Collective.

        With `outer`, this makes ranks equal: changes since the last exchange are averaged in one more exchange of all
        fragments. The anchor moves by this mean, without the outer optimizer, whose momentum is meant for a whole
        interval. With a `timedelta`, ranks take part in exchanges until all have called this. The next step begins a
        new interval.

        Raises:
            CommError: An exchange failed.
        """
        with torch.no_grad():
            self._end_exchanges()
            for fragment in self._fragments if self.outer is not None and self._turns is None else ():
                self._start(fragment, 0, None, is_last=True)
                self._apply(fragment)

    def _end_exchanges(self) -> None:
        if self._turns is not None:
            self._leave(self._turns)
        for fragment in self._fragments:
            self._apply(fragment)

    def _act(self) -> None:
        """Exchange all fragments now, and continue from the results, without this rank's share of parameters."""
        self._end_exchanges()
        for fragment in self._fragments if self._turns is None else ():
            self._start(fragment, 0, None)
            self._apply(fragment)

    def _tensors(self, fragment: Fragment) -> list[torch.Tensor]:
        """The tensors of a fragment."""
        named = floating(self.named)
        names = dict(self._known).keys() ^ dict(named).keys()
        odd = [name for name, _ in (*self._known, *named) if name in names]
        for (name, tensor), (_, known), there in zip(named, self._known, self.anchor, strict=False):
            # A forward may assign a buffer.
            is_new = tensor is not known and isinstance(tensor, torch.nn.Parameter)
            if is_new or tensor.shape != there.shape or tensor.device != there.device:
                odd.append(name)
        if odd:
            problem = f"{odd[0]!r} was added, removed, resized, moved or replaced since its averager was created"
            self._comm.abort(problem)
            raise RuntimeError(f"{problem}. Create a new {type(self).__name__} for the changed model")
        return [named[i][1].detach() for i in fragment.members]

    @torch.no_grad()
    def _on_load(self, name: str, module: torch.nn.Module) -> None:
        """Hook after a module has loaded: training and the anchor continue from the loaded values.

        An exchange in flight has the old values, so its result is dropped, consistently if all ranks have loaded; the
        next exchange compares the anchor.
        """
        # For tied parameters only the first name is known.
        numbers = {key: i for i, (known, tensor) in enumerate(self._known) for key in (known, id(tensor))}
        own = chain(module.named_parameters(name, recurse=False), module.named_buffers(name, recurse=False))
        with self._lock:
            for key, tensor in own:
                index = numbers.get(key, numbers.get(id(tensor)))
                if index is None:
                    continue
                self._known[index] = self._known[index][0], tensor
                if self._resumed:
                    continue
                fragment = next(each for each in self._fragments if index in each.members)
                fragment.samples = 0
                if fragment.exchange is not None:
                    fragment.exchange.is_dropped = True
                if self.anchor and self.anchor[index].shape == tensor.shape:
                    value = tensor.to(self.anchor[index])
                    if not torch.equal(self.anchor[index], value):
                        fragment.is_loaded = True
                        self.anchor[index].copy_(value)
                        # The old weights' momentum would move the loaded ones.
                        cast(torch.optim.Optimizer, self.outer).state.pop(self.anchor[index], None)

    # -- an exchange ---------------------------------------------------------------------------
    def _start(
        self, fragment: Fragment, lag: int, alpha: float | None, *, late: bool = False, is_last: bool = False
    ) -> None:
        """Begin an exchange, in another thread if its result may lag. A late rank contributes nothing."""
        if not late and (failure := self._comm.exception()) is not None:
            raise failure.locate(rank=self._comm.rank, size=self._comm.size, operation="all_reduce")
        here = self._tensors(fragment)
        in_place = self.outer is None and not lag and not alpha
        if late:
            given = [torch.zeros_like(there) for there in fragment.anchor]
        elif self.outer is None:
            given = here if in_place else [p.clone() for p in here]
        else:
            # Ranks started from the anchor rounded to the parameter's dtype; the rounding must not count as a change.
            given = [a.to(p.dtype).to(a.dtype) - p.to(a.dtype) for a, p in zip(fragment.anchor, here, strict=True)]
        # All fragments may have exchanges queued before this one.
        done = Completion(self._limit_s * len(self._fragments) * len(self._messages(given)))
        aside = lag > 0 or self._turns is not None
        streams = current_streams(p.device for p in given) if aside else []
        own = [torch.Stream(device=stream.device) for stream in streams]
        exchange = _PendingExchange(self.steps + lag, given, done, alpha, in_place, streams=own, is_last=is_last)
        if lag and alpha is None:
            if self.outer is None:
                exchange.expected = [p.clone() for p in here]
            else:
                exchange.own = [change.clone() for change in given]
                exchange.expected = self._go_ahead(fragment, here, exchange.own)
        if self._turns is not None:
            exchange.behind_s = self._turns.take()
            if not late:
                exchange.samples = fragment.samples
                exchange.leaving = self._turns.leaving
                exchange.rates = self._rates()
                fragment.samples = 0
        state = {
            "rounds": fragment.rounds,
            "steps": self.steps if self._turns is None else None,
            "digests of what was loaded": [tensor_hash(a).item() for a in fragment.anchor if fragment.is_loaded],
        }
        fragment.is_loaded = False
        task = partial(self._exchange, fragment, exchange, streams, state)
        if aside:
            self._worker.run(task)
        else:
            task()
        # `_apply` only waits for an exchange that was started.
        fragment.exchange = exchange

    def _exchange(
        self,
        fragment: Fragment,
        exchange: _PendingExchange,
        after: list[torch.Stream],
        state: Mapping[str, object],
    ) -> None:
        """Reduce the contributions, one message after another, ordered after the work queued on streams."""
        error: BaseException | None = None
        began_s = 0.0
        what = f"averaging fragment {self._fragments.index(fragment)}, whose result is for step {exchange.due}"
        try:
            with torch.no_grad(), ErrorContext(what), entered(exchange.streams):
                wait_for(after)
                self._compare(state)
                if self._turns is not None:
                    behind_s = self._weigh(exchange, self._turns)
                    began_s = time.monotonic() - behind_s
                for index, message in enumerate(self._messages(exchange.tensors) if exchange.of_all else ()):
                    codec = fragment.codecs[index] if fragment.codecs else None
                    shapes = [t.shape for t in message]
                    flat_apply(message, partial(self._reduce_message, codec, shapes, fragment.rounds))
        except BaseException as raised:
            error = raised
        self._error = self._error or error
        exchange.done.complete(error)
        if self._turns is not None:
            with self._lock:
                if error is None:
                    self._end_turn(self._turns, began_s)
                self._lock.notify_all()

    def _reduce_message(self, codec: Codec | None, shapes: list[torch.Size], turn: int, memory: torch.Tensor) -> None:
        flat = memory.detach().view(-1)
        if codec is None:
            self._reduce(flat, self._comm, turn)
        else:
            codec.average(flat, self._comm, shapes)

    def _apply(self, fragment: Fragment) -> bool:
        """Wait for a fragment's exchange, and apply the result; return False if none is in flight."""
        exchange = fragment.exchange
        if exchange is None:
            return False
        exchange.done.wait()
        wait_for(exchange.streams)
        with self._lock:
            if fragment.exchange is not exchange:
                # This rank was late for its next turn, so the result is already in the anchor.
                return self._apply(fragment)
            self._step_anchor(fragment, exchange)
            if exchange.in_place or exchange.is_dropped:
                return True
            results = exchange.tensors if self.outer is None else fragment.anchor
            for index, (here, there) in enumerate(zip(self._tensors(fragment), results, strict=True)):
                if exchange.expected is not None:
                    here.sub_(exchange.expected[index]).add_(there)
                else:
                    here.copy_(torch.lerp(there, here.to(there.dtype), exchange.alpha) if exchange.alpha else there)
            if exchange.expected is None and not exchange.alpha:
                fragment.samples = 0
        return True

    def _step_anchor(self, fragment: Fragment, exchange: _PendingExchange) -> None:
        """Step a fragment of the anchor with the result of an exchange that has ended."""
        fragment.exchange = None
        fragment.rounds += 1
        if self.outer is None or not exchange.of_all or exchange.is_dropped:
            return
        if exchange.is_last:
            for there, change in zip(fragment.anchor, exchange.tensors, strict=True):
                there.sub_(change)
            return
        for group, rate in zip(self.outer.param_groups, exchange.rates, strict=False):
            group["lr"] = rate
        _step(self.outer, fragment.anchor, exchange.tensors)

    def _go_ahead(
        self, fragment: Fragment, here: list[torch.Tensor], changes: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Move this rank to the result predicted from its own contribution, and return that.

        The anchor and its optimizer stay unchanged: the step is made on copies that temporarily replace them.
        """
        assert self.outer is not None
        settings = [dict(group) for group in self.outer.param_groups]
        places = [there.data for there in fragment.anchor]
        states = [self.outer.state.get(there) for there in fragment.anchor]
        for there, state in zip(fragment.anchor, states, strict=True):
            there.data = there.clone()
            self.outer.state[there] = copy.deepcopy(state or {})
        _step(self.outer, fragment.anchor, changes)
        for group, values in zip(self.outer.param_groups, settings, strict=True):
            group.clear()
            group.update(values)
        expected = []
        for parameter, there, place, state in zip(here, fragment.anchor, places, states, strict=True):
            expected.append(there.data.to(parameter.dtype))
            parameter.copy_(expected[-1])
            there.data = place
            self.outer.state[there] = state or {}
        return expected

    def _messages(self, tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        return list(buckets(tensors, self._cap))

    # -- turns of ranks of different speed -----------------------------------------------------
    @property
    def _in_turn(self) -> Fragment:
        """The fragment whose turn it is."""
        number = 0 if self._turns is None else self._turns.number
        return self._fragments[number % len(self._fragments)]

    def _rates(self) -> list[float]:
        """The learning rates of the outer optimizer."""
        return [float(group["lr"]) for group in self.outer.param_groups if "lr" in group] if self.outer else []

    def _begin_turn(self, last_s: float) -> None:
        """Schedule the next turn. Its timer holds the averager weakly, so a dropped averager is not kept alive."""
        if self._turns is not None:
            self._turns.begin(last_s, partial(_take_late, ref(self)))

    def _take_turn_late(self, number: int) -> None:
        """Take part without a contribution, because training did not finish a step in time."""
        with self._lock, torch.no_grad():
            turns = self._turns
            if turns is None or turns.number != number or turns.due_s in (None, math.inf):
                return
            fragment = self._in_turn
            if fragment.exchange is not None:
                # Training has not even applied the previous turn's result.
                wait_for(fragment.exchange.streams)
                self._step_anchor(fragment, fragment.exchange)
            self.missed += 1
            _log.warning(
                "rank %d was more than %g s late for exchange %d: its latest %g samples do not count",
                self._comm.rank,
                turns.max_lag_s,
                turns.number,
                fragment.samples,
            )
            self._start(fragment, 0, None, late=True)

    def _weigh(self, exchange: _PendingExchange, turns: _Turns) -> float:
        """Scale the contribution by its share of all samples; agree on which ranks leave, and on learning rates.

        Returns: The largest delay of any rank in taking the turn, in seconds.
        """
        told = [exchange.samples, exchange.leaving, exchange.behind_s, *(exchange.rates or self._rates())]
        mine = torch.tensor(told, dtype=torch.float64, device=self._comm.device)
        everyone = mine.new_empty(self._comm.size * mine.numel())
        # A leaving rank takes the turn before it is due.
        limit_s = engine_of(self._comm).options.timeout_s + turns.interval_s + turns.max_lag_s
        self._comm.all_gather_single(everyone, mine, timeout=limit_s)
        rows: list[list[float]] = everyone.view(self._comm.size, -1).tolist()
        turns.left = turns.left + 1 if all(row[1] for row in rows) else 0
        exchange.of_all = sum(row[0] for row in rows)
        for row in rows:
            if row[0]:
                # A late rank may be elsewhere in a schedule, so all use the rates of the first rank that was on time.
                exchange.rates = row[3:]
                break
        for tensor in exchange.tensors if exchange.of_all else ():
            tensor.mul_(exchange.samples * self._comm.size / exchange.of_all)
        return max(row[2] for row in rows)

    def _end_turn(self, turns: _Turns, began_s: float) -> None:
        """Schedule the next turn, unless all ranks were leaving for one turn of each fragment."""
        turns.number += 1
        if turns.left >= len(self._fragments):
            turns.end()
            turns.leaving = False
            turns.left = 0
        else:
            self._begin_turn(began_s)

    def _leave(self, turns: _Turns) -> None:
        """Take each turn immediately until all ranks have left."""
        turns.leaving = True
        with self._lock:
            if turns.due_s is None:
                self._begin_turn(time.monotonic())
        while True:
            with self._lock:
                self._lock.wait_for(lambda: turns.due_s != math.inf or self._error is not None)
                if self._error is not None:
                    raise self._error
                if turns.due_s is None:
                    return
                fragment = self._in_turn
                self._apply(fragment)
                self._start(fragment, 0, None)
            self._apply(fragment)

    # -- state and end -------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the state from which to resume. Waits for the exchanges in flight; tensors are not copied.

        With a `timedelta`, only after `finish`, when ranks are between intervals and equal.

        The same on all ranks, except with codecs, with `Gossip`, and with exchanges in flight and no `alpha`: wrap it
        in `un.checkpoint.PerRank` in these cases.
        """
        self._refuse_while_taking_turns()
        state = {**super().state_dict(), "rank": 0, "fragments": [], "rounds": [], "under_way": [], "codecs": []}
        named = floating(self.named)
        for fragment in self._fragments:
            exchange = fragment.exchange
            if exchange is not None:
                exchange.done.wait()
                wait_for(exchange.streams)
            state["fragments"].append([named[i][0] for i in fragment.members])
            state["rounds"].append(fragment.rounds)
            if exchange is not None and exchange.is_dropped:
                exchange = None
            state["under_way"].append([exchange.due, exchange.tensors, exchange.expected] if exchange else None)
            state["codecs"].append([codec and codec.state_dict() for codec in fragment.codecs])
        if any(fragment.codecs for fragment in self._fragments):
            state["rank"] = self._comm.rank
        if self.outer is not None:
            state["anchor"] = {name: there for (name, _), there in zip(named, self.anchor, strict=True)}
            state["outer"] = self.outer.state_dict()
        return state

    def _refuse_while_taking_turns(self) -> None:
        if self._turns is not None and self._turns.due_s is not None:
            raise RuntimeError("ranks are inside of an interval. Call finish() on all ranks: they are equal after it")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume where a job stopped; load the model's own parameters as usual. Every rank loads its own state.

        Load the two in either order: until the next step, loading the model does not change this state's anchor.

        If the ranks have changed, they load any rank's state: the error that a codec has yet to feed back is loaded by
        its own rank only, and otherwise lost.

        Args:
            state: A result of `state_dict` with the same fragments.

        Raises:
            ValueError: The state belongs to another model, other fragments, or another outer optimizer.
            RuntimeError: With a `timedelta`: training has begun, and `finish` was not called.
        """
        self._refuse_while_taking_turns()
        named = floating(self.named)
        anchor = state.get("anchor", {})
        found = {name: tuple(t.shape) for name, t in anchor.items()}
        wanted = {name: tuple(t.shape) for name, t in named if self.outer is not None}
        if found != wanted:
            name = next(n for n in {**wanted, **found} if found.get(n) != wanted.get(n))
            raise ValueError(
                f"the state is of another model: {name!r} has shape {found.get(name)} in it, {wanted.get(name)} here"
            )
        names = [[named[i][0] for i in fragment.members] for fragment in self._fragments]
        if state["fragments"] != names:
            raise ValueError(f"the state is of fragments {state['fragments']}, not {names}")
        if self.outer is not None:
            # First, because the optimizer refuses a state that does not fit before anything changes.
            self.outer.load_state_dict(state["outer"])
        super().load_state_dict(state)
        with torch.no_grad():
            for (name, _), there in zip(named, self.anchor, strict=False):
                there.copy_(anchor[name])
        saved = zip(state["rounds"], state["under_way"], state["codecs"], strict=True)
        for fragment, (rounds, under_way, codecs) in zip(self._fragments, saved, strict=True):
            fragment.rounds = int(rounds)
            fragment.is_loaded = self.outer is not None
            fragment.exchange = None
            if under_way is not None:
                due, tensors, expected = under_way
                arrived = _PendingExchange(int(due), tensors, Completion.ended(), self._alpha, expected=expected)
                fragment.exchange = arrived
            for codec, one in zip(fragment.codecs, codecs, strict=True):
                if codec is not None and state["rank"] == self._comm.rank:
                    codec.load_state_dict(one)
        self._resumed = True

    def move_to(self, comm: Communicator) -> None:
        """Switch to the ranks of another communicator, such as the result of `comm.rebuild()`.

        Collective over it; new ranks create their own averager in the meantime. Results that have arrived are applied,
        and other exchanges repeated, so that this rank's training is kept. A rank with fewer results than another, such
        as a new one, continues from the anchor. The codecs' error feedback is lost.

        Args:
            comm: The new communicator.

        Raises:
            MismatchError: Ranks have different parameters or arguments.
        """
        self._disconnect()
        with torch.no_grad():
            for fragment in self._fragments:
                exchange = fragment.exchange
                if exchange is not None and exchange.done.is_completed() and exchange.done.exception() is None:
                    self._apply(fragment)
                elif exchange is not None:
                    fragment.samples += exchange.samples
                    fragment.exchange = None
                    ahead = zip(
                        self._tensors(fragment), fragment.anchor, exchange.own, exchange.expected or (), strict=False
                    )
                    for here, there, own, expected in ahead if not exchange.is_dropped else ():
                        here.add_(there - own - expected)
                fragment.codecs = [codec and codec.clone() for codec in fragment.codecs]
                fragment.is_loaded = False
        if self._turns is not None:
            self._turns = _Turns(self._turns.interval_s, self._turns.max_lag_s)
        self._connect(comm)
        progress = self._comm.all_gather_object((sum(fragment.rounds for fragment in self._fragments), self.steps))
        leader = progress.index(max(progress))
        state = self._comm.broadcast_object(self.state_dict() if comm.rank == leader else None, src=leader)
        if progress[comm.rank][0] < progress[leader][0]:
            self.load_state_dict(state)
            with torch.no_grad():
                for fragment in self._fragments:
                    fragment.samples = 0
                    fragment.is_loaded = False
                    for here, there in zip(self._tensors(fragment), fragment.anchor, strict=False):
                        here.copy_(there)
        self.steps: int = progress[leader][1]
        # The model may be loaded next, as `un.elastic.Recovery` does, and must not replace the leader's anchor.
        self._resumed = True


def _refuse(argument: str, given: object) -> None:
    if given is not None:
        raise ValueError(
            f"{argument} needs outer=, such as DiLoCo's, and reduce='mean': it averages changes from an anchor"
        )


def _step(outer: torch.optim.Optimizer, anchor: list[torch.Tensor], changes: list[torch.Tensor]) -> None:
    """Step the anchor, or a part of it, with changes as its gradient."""
    for there, change in zip(anchor, changes, strict=True):
        there.grad = change
    outer.step()
    outer.zero_grad()


def _end(worker: SerialWorker, turns: _Turns | None, limit_s: float) -> None:
    if turns is not None:
        turns.end()
    worker.end()
    worker.join(limit_s)


def _take_late(averager: ref[PeriodicAverager], number: int) -> None:
    if (there := averager()) is not None:
        there._take_turn_late(number)


def floating(named: Named) -> Named:
    """Return the tensors that can be averaged."""
    return [(name, tensor) for name, tensor in named if tensor.is_floating_point() or tensor.is_complex()]


def _wide(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return a copy of a parameter in the dtype of its anchor."""
    if dtype is None or tensor.is_complex():
        dtype = torch.promote_types(tensor.dtype, torch.float32)
    return tensor.detach().to(dtype, copy=True)


def _reduction(given: str | Reduction) -> Reduction:
    if isinstance(given, str):
        if given not in _REDUCTIONS:
            raise ValueError(f"unknown reduction {given!r}; known: {', '.join(_REDUCTIONS)}")
        return _REDUCTIONS[given]
    if not callable(given):
        raise TypeError(f"reduce must be a name or a function, not {type(given).__name__}")
    return given


def _described(optimizer: torch.optim.Optimizer | None) -> str:
    """Return an optimizer's class and settings as text, for comparison between ranks."""
    if optimizer is None:
        return "None"
    settings = {k: v for k, v in optimizer.defaults.items() if isinstance(v, bool | int | float | str | tuple)}
    return f"{type(optimizer).__name__}({', '.join(f'{key}={value}' for key, value in settings.items())})"


def _divide(
    named: Named, fragments: int | Sequence[Sequence[str]], schedule: Schedule
) -> list[tuple[list[int], Schedule]]:
    """Return each fragment's parameter indices and schedule; fragments are evenly spaced within the interval."""
    parts = _by_bytes(named, fragments) if isinstance(fragments, int) else _by_name(named, fragments)
    if len(parts) == 1:
        return [(parts[0], schedule)]
    if not isinstance(schedule, PeriodicSchedule):
        raise ValueError("several fragments need a number of steps in every=, of which each takes its part")
    return [(part, replace(schedule, offset=i * schedule.n // len(parts))) for i, part in enumerate(parts)]


def _by_bytes(named: Named, count: int) -> list[list[int]]:
    whole_number("fragments", count, 1, "fragment")
    total = max(1, sum(t.nbytes for _, t in named))
    parts: list[list[int]] = [[] for _ in range(count)]
    before = 0
    for index, (_, tensor) in enumerate(named):
        middle = before + tensor.nbytes // 2
        parts[min(count * middle // total, count - 1)].append(index)
        before += tensor.nbytes
    return [part for part in parts if part] or [[]]


def _by_name(named: Named, fragments: Sequence[Sequence[str]]) -> list[list[int]]:
    owner: dict[int, int] = {}
    for number, prefixes in enumerate(fragments):
        for prefix in prefixes:
            inside = [i for i, (name, _) in enumerate(named) if name == prefix or name.startswith(f"{prefix}.")]
            if not inside:
                raise ValueError(f"fragment {number} names {prefix!r}, which no parameter or module is called")
            for index in inside:
                if owner.setdefault(index, number) != number:
                    raise ValueError(f"{named[index][0]!r} is in fragments {owner[index]} and {number}")
    left = [name for index, (name, _) in enumerate(named) if index not in owner]
    if left:
        raise ValueError(f"{left[0]!r} is in no fragment, and {len(left) - 1} more parameters")
    return [[index for index in sorted(owner) if owner[index] == number] for number in range(len(fragments))]
