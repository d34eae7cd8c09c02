"""Periodic averaging: ranks train independently, and exchange each fragment of their parameters when it is due."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from typing import Any, TypedDict
from weakref import finalize

import torch

from unisono.comm.equal_tensors import assert_equal_tensors
from unisono.communicator import Communicator
from unisono.core.load_hook import follow_loads
from unisono.core.work import Completion, positive_timeout
from unisono.gradients.anchor import Anchor, OuterUpdate
from unisono.gradients.buckets import codec_for
from unisono.gradients.exchange import Ahead, Exchange, Fragment
from unisono.gradients.exchanges import Exchanges, ExchangeSettings, Reduction, StepExchanges
from unisono.gradients.periodic import (
    PeriodicAction,
    PeriodicSchedule,
    Schedule,
    TimedSchedule,
    schedule_of,
    whole_number,
)
from unisono.gradients.robust import ClippedMean, TrimmedMean
from unisono.gradients.turns import Turns
from unisono.utils.flatten import MIB, buckets
from unisono.utils.parameters import Model, Named, check_parameters, named_tensors

__all__ = ["ExchangeOptions", "PeriodicAverager", "floating", "mean"]


class ExchangeOptions(TypedDict, total=False):
    """Arguments that `DiLoCo` and other subclasses pass on to `PeriodicAverager`."""

    fragments: int | Sequence[Sequence[str]]
    reduce: str | Reduction
    overlap_steps: int
    alpha: float | None
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


class PeriodicAverager(PeriodicAction):
    """Base class of periodic averaging; `LocalSGD`, `DiLoCo` and `Gossip` are configurations of this class.

    Provisional: it may change in any minor version, without a deprecation.

    Ranks train independently. When a fragment (a subset of the parameters) is due, the ranks' contributions are
    reduced, and the result is applied `overlap_steps` steps later. Without `outer`, the parameters themselves are
    averaged. With `outer`, the contribution is the change from a common anchor. The outer optimizer uses the mean
    change as the gradient of the anchor, and ranks continue from the updated anchor. Construction is collective, and so
    is each `step` in which a fragment is sent or applied.

    You may load other weights into the module at any time, on all ranks: with `load_state_dict` (of the module or a
    submodule, also with `assign=True`), from a checkpoint, or with `un.broadcast_parameters`. Loaded weights become the
    anchor; for the loaded parameters, outer momentum and results in flight are dropped. Any other change to parameter
    values counts as training. Names and shapes of parameters must not change; with `outer`, the parameter objects must
    not change either.

    If Ctrl-C interrupts a call that only waits for a result, the next call waits again. If Ctrl-C interrupts an
    exchange or a change to the parameters, every later exchange raises a `CommError` on all ranks, until `move_to` is
    called.

    Args:
        model: A module, or its parameters. Integer parameters remain unchanged. If you pass a list or a ScriptModule,
            the averager does not detect that weights are loaded.
        comm: Communicator of the ranks that take part.
        every: A number of steps, an `every(...)`, or a function of the step's number (from 1). For ranks that run at
            different speeds, pass a `timedelta`: each rank takes as many steps as it can in that time, and its
            contribution is weighted by its number of samples. To limit the wait for a late rank, pass
            `every(timedelta(...), max_lag=...)`. With a `timedelta`, `outer` and `reduce="mean"` are required.
        buffers: Also average a module's floating-point buffers.
        outer: An `OuterUpdate`, or None. With `outer`, ranks must start from equal parameters.
        fragments: Number of fragments of about equal size, in parameter order; or, for each fragment, a list of names
            of parameters or modules ("layers.3"). Of p fragments, fragment k is due k / p of an interval later than
            fragment 0 (Douillard et al., Streaming DiLoCo, 2025). With more than one fragment, `every` must not be a
            function.
        reduce: "mean", "trimmed_mean", "median", "clipped_mean" (see `TrimmedMean`, `ClippedMean`); or a function that
            takes a flat tensor to change in place, a communicator, and the number of the fragment's exchange (from 0).
            With `outer`, the reduction's result must be the same on all ranks.
        overlap_steps: Number of steps that training takes between sending a fragment and applying the result; fewer if
            the fragment is due again earlier. With 0, training waits for each exchange.
        alpha: Weight of this rank's own parameters when they are mixed with a result, from 0 to less than 1; Streaming
            DiLoCo uses 0.5. If None and `overlap_steps` is not 0, training continues from a predicted result, computed
            as if all ranks sent this rank's contribution. When the true result is applied, its difference from the
            prediction is added (after Kale et al., Eager updates, 2025), which reduces the effect of the delay on the
            loss. With `outer`, a prediction costs a second run of the outer optimizer in each exchange.
        bucket_cap_mb: Maximum message size in MiB.

    Raises:
        MismatchError: Ranks have different parameters or arguments. An exchange raises `MismatchError` on every rank if
            ranks have taken different numbers of steps (unless `every` is a time), resumed from different steps, or
            loaded different weights.
        RuntimeError: An exchange has found that a parameter was added, removed, replaced or reshaped.
        ValueError: An argument is out of range or incompatible with others; nothing was sent.
        TypeError: A number of steps or of fragments is not an int.

    Attributes:
        anchor: With `outer`, the value of each floating-point parameter when ranks last had equal parameters; otherwise
            empty.
        outer: The outer optimizer; its learning rate may be scheduled like any other.
        missed: If `every` is a time, the number of exchanges that lacked this rank's contribution because it was late.
            Each missed exchange is logged as a warning on the logger "unisono".

    Cost: in each interval, one average of the parameters (with `outer`, in the anchor's dtype). If `every` is a time,
    ranks also gather about 24 bytes per rank. Memory: with `outer`, the anchor, the outer optimizer's state, and a copy
    of the fragments in flight; with `overlap_steps` and without `alpha`, two more copies of the fragments in flight.

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

    _by_steps: type[StepExchanges] = StepExchanges
    """Class for exchanges that are scheduled by steps."""
    _more_settings: Mapping[str, object] = {}
    """A subclass's own arguments that must agree on all ranks, by name; set before `__init__`."""

    def __init__(
        self,
        model: Model,
        comm: Communicator,
        every: int | Schedule | timedelta | TimedSchedule = 8,
        *,
        buffers: bool = False,
        outer: OuterUpdate | None = None,
        fragments: int | Sequence[Sequence[str]] = 1,
        reduce: str | Reduction = "mean",
        overlap_steps: int = 0,
        alpha: float | None = None,
        bucket_cap_mb: float = 25,
    ) -> None:
        timed = TimedSchedule(every) if isinstance(every, timedelta) else every
        self._timed = timed if isinstance(timed, TimedSchedule) else None
        # If `every` is a time, `Turns` decides when to exchange, and this schedule is never evaluated.
        schedule = schedule_of(1 if isinstance(timed, TimedSchedule) else timed)
        if reduce != "mean" and outer is not None and outer.compression is not None:
            raise ValueError("compression= needs reduce='mean': the codec computes the mean")
        if self._timed is not None and (outer is None or reduce != "mean"):
            raise ValueError(
                "every=timedelta(...) needs outer=, such as DiLoCo's, and reduce='mean': it averages changes from an "
                "anchor"
            )
        # Read an iterator of parameters into a list: it can be read only once, and the base class reads the model
        # again.
        model = model if isinstance(model, torch.nn.Module) else named_tensors(model)
        self._known = named = floating(named_tensors(model, buffers=buffers))
        check_parameters(named)
        whole_number("overlap_steps", overlap_steps, 0)
        if alpha is not None and not 0 <= alpha < 1:
            raise ValueError(f"alpha must be None or from 0 to less than 1, not {alpha}")
        self._exchange_settings = ExchangeSettings(overlap_steps, alpha, _reduction(reduce), int(bucket_cap_mb * MIB))
        parts = _by_bytes(named, fragments) if isinstance(fragments, int) else _by_name(named, fragments)
        self._schedules = _staggered(schedule, len(parts))
        # Create the anchor and the fragments before `super().__init__`, which calls `_connect`. Nothing is sent before
        # `super().__init__`, so a `ValueError` is raised without communication, as the class promises.
        self._anchor = None if outer is None else Anchor([tensor for _, tensor in named], outer)
        self._fragments = [Fragment(members, [self.anchor[i] for i in members if self.anchor]) for members in parts]
        codec = None if outer is None else codec_for(outer.compression)
        # A codec with error feedback keeps a residual of its message, so each message gets its own codec.
        for fragment in self._fragments if codec is not None else ():
            messages = buckets(fragment.anchor, self._exchange_settings.cap)
            fragment.codecs = [codec and codec.clone() if m[0].is_floating_point() else None for m in messages]
        # Whether `load_state_dict` has restored the anchor. If so, loading the model before the next step must not
        # replace it.
        self._resumed = False
        settings = {
            "interval": str(self._timed and self._timed.interval),
            "outer": None if self._anchor is None else self._anchor.described(),
            "fragments": repr(fragments),
            "reduce": reduce if isinstance(reduce, str) else getattr(reduce, "__qualname__", repr(reduce)),
            "compression": repr(codec),
            "overlap_steps": overlap_steps,
            "max_lag": str(self._timed and self._timed.max_lag),
            "alpha": alpha,
            "anchor_dtype": str(outer and outer.anchor_dtype),
            "bucket_cap_mb": bucket_cap_mb,
            **self._more_settings,
        }
        super().__init__(model, comm, schedule, buffers=buffers, settings=settings)
        try:
            self._follow_leader(is_new=True)
        except Exception:
            # Close the new communicator on any error, and re-raise the error.
            self._comm.close()
            raise
        follow_loads(model, self, self._on_load)

    def _connect(self, comm: Communicator) -> None:
        super()._connect(comm)
        self._exchanges = self._new_exchanges()
        # Make the communicator's `close` wait for the worker, whose last exchange still uses the communicator. If the
        # averager is dropped without `close`, a finalizer stops the worker.
        self._comm.before_close(self._exchanges.joiner())
        finalize(self, self._exchanges.end)

    def _new_exchanges(self) -> Exchanges:
        common = type(self).__name__, self._comm, self._fragments
        if self._timed is None:
            return self._by_steps(*common, self._anchor, self._exchange_settings, self._schedules)
        # Timed exchanges multiply each rank's contribution by a weight, which is correct only if contributions are
        # changes from an anchor.
        assert self._anchor is not None
        interval_s = positive_timeout(self._timed.interval, "every") / len(self._fragments)
        lag = self._timed.max_lag
        max_lag_s = interval_s if lag is None else positive_timeout(lag, "max_lag")
        return Turns(*common, self._anchor, self._exchange_settings, interval_s, max_lag_s)

    # -- steps ---------------------------------------------------------------------------------
    @property
    def anchor(self) -> list[torch.Tensor]:
        """With `outer`, each floating-point parameter's value when ranks last had equal parameters; otherwise empty."""
        return [] if self._anchor is None else self._anchor.tensors

    @property
    def outer(self) -> torch.optim.Optimizer | None:
        """The outer optimizer, or None; its learning rate may be scheduled as usual."""
        return None if self._anchor is None else self._anchor.outer

    @property
    def missed(self) -> int:
        """If `every` is a time, the number of exchanges that lacked this rank's contribution because it was late."""
        return sum(fragment.missed for fragment in self._fragments)

    @property
    def rounds(self) -> int:
        """Number of intervals whose results have all been applied."""
        return self._fragments[-1].rounds

    def step(self, samples: int | None = None) -> bool:
        """Count a step; send the fragments and apply the results that are due. Call `step` after each optimizer step.

        Collective when a fragment is sent or applied. If `every` is a time, no rank waits for another rank's step. Stop
        each rank at the same number of `rounds`, or when its samples run out, and then call `finish`.

        Args:
            samples: Number of samples in this step, such as `len(batch)`, if `every` is a time. None means 1.

        Returns: Whether a result was applied.

        Raises:
            CommError: An exchange failed, perhaps in the background; the error's notes say which one, and every later
                step raises the error again.
            TypeError: Samples were passed, but `every` is not a time.
        """
        if samples is not None and self._timed is None:
            raise TypeError("samples weight the contributions of ranks of different speed: pass a timedelta in every=")
        # Raise an earlier error before counting the step, because exchanges compare the ranks' step counts.
        self._exchanges.check()
        self.steps += 1
        self._resumed = False
        with torch.no_grad():
            return self._exchanges.step(self.steps, 1 if samples is None else samples, self._tensors)

    def finish(self) -> None:
        """Complete the exchanges in flight and apply their results, at the end of training. Collective.

        With `outer`, ranks have equal parameters afterwards: one more exchange averages the changes in each fragment
        since it was last sent, and moves the anchor by the mean change. The outer optimizer is not used, because its
        momentum is meant for a whole interval. If `every` is a time, there is no additional exchange: ranks take part
        in the usual exchanges until all ranks have called `finish`. The first step after `finish` begins a new
        interval.

        Raises:
            CommError: An exchange failed.
        """
        with torch.no_grad():
            self._exchanges.finish(self.steps, self._tensors)

    def _act(self) -> None:
        self._exchanges.exchange_all(self.steps, self._tensors)

    def _tensors(self, fragment: Fragment) -> list[torch.Tensor]:
        """Return the current tensors of a fragment; raise if the model's parameters have changed."""
        named = floating(self.named)
        names = dict(self._known).keys() ^ dict(named).keys()
        odd = [name for name, _ in (*self._known, *named) if name in names]
        # Without an anchor, `self.anchor` is empty, so this loop checks nothing: a plain average uses the model's
        # current parameters, even if they have replaced earlier ones.
        for (name, tensor), (_, known), there in zip(named, self._known, self.anchor, strict=False):
            # A parameter must be the same object as before; a buffer need not be, because a forward pass may replace
            # it.
            is_new = tensor is not known and isinstance(tensor, torch.nn.Parameter)
            if is_new or tensor.shape != there.shape or tensor.device != there.device:
                odd.append(name)
        if odd:
            problem = f"{odd[0]!r} was added, removed, resized, moved or replaced since its averager was created"
            # Abort the communicator: otherwise, the other ranks would wait for this rank in the exchange.
            self._comm.abort(problem)
            raise RuntimeError(f"{problem}. Create a new {type(self).__name__} for the changed model")
        return [named[i][1].detach() for i in fragment.members]

    @torch.no_grad()
    def _on_load(self, name: str, module: torch.nn.Module) -> None:
        """Hook, called after a module has loaded weights: training and the anchor continue from the loaded values.

        An exchange in flight was started with the old values, so it has no effect on the loaded parameters. All ranks
        must load the same weights; with `outer`, the next exchange checks this by comparing the anchor.
        """
        # Look up tensors by `id` as well as by name, because only the first name of a tied parameter is known.
        numbers = {key: i for i, (known, tensor) in enumerate(self._known) for key in (known, id(tensor))}
        own = chain(module.named_parameters(name, recurse=False), module.named_buffers(name, recurse=False))
        # Keep the worker thread out: in timed exchanges, it may be taking an outer step on the anchor at this moment.
        with self._exchanges.held():
            for key, tensor in own:
                index = numbers.get(key, numbers.get(id(tensor)))
                if index is None:
                    continue
                # `load_state_dict(assign=True)` puts other objects into the module, which `_tensors` must accept.
                self._known[index] = self._known[index][0], tensor
                if self._resumed:
                    continue
                fragment = next(each for each in self._fragments if index in each.members)
                fragment.samples = 0
                if fragment.exchange is not None:
                    fragment.exchange.loaded.add(fragment.members.index(index))
                # If the shape has changed, `_tensors` reports that in the next exchange, and aborts all ranks.
                if self._anchor is not None and self.anchor[index].shape == tensor.shape:
                    fragment.is_loaded |= self._anchor.load(index, tensor)

    # -- state and end -------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from, after waiting for exchanges in flight. Tensors are not copied.

        If `every` is a time, call `state_dict` only after `finish`, when no interval is in progress and ranks have
        equal parameters.

        The state is the same on all ranks, except with codecs, with `Gossip`, or with exchanges in flight and no
        `alpha`; in these three cases, wrap the state in `un.checkpoint.PerRank`.
        """
        self._exchanges.check()
        self._exchanges.check_between()
        state = {**super().state_dict(), "rank": 0, "fragments": [], "rounds": [], "under_way": [], "codecs": []}
        named = floating(self.named)
        for fragment in self._fragments:
            exchange = fragment.exchange
            if exchange is not None:
                # Wait, because the thread that reduces writes to the tensors until the exchange is done.
                exchange.wait()
            state["fragments"].append([named[i][0] for i in fragment.members])
            state["rounds"].append(fragment.rounds)
            saved = None
            if exchange is not None:
                # Leave out `ahead.own`: it serves only to undo a failed exchange, and this exchange has succeeded.
                expected = exchange.ahead and exchange.ahead.expected
                saved = [exchange.due, exchange.tensors, expected, sorted(exchange.loaded)]
            state["under_way"].append(saved)
            state["codecs"].append([codec and codec.state_dict() for codec in fragment.codecs])
        if any(fragment.codecs for fragment in self._fragments):
            state["rank"] = self._comm.rank
        if self.outer is not None:
            state["anchor"] = {name: there for (name, _), there in zip(named, self.anchor, strict=True)}
            state["outer"] = self.outer.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved state; load the model's own parameters as usual. Every rank loads its own state.

        Load the averager and the model in either order: until the next step, loading the model does not change the
        restored anchor.

        If the set of ranks has changed, each rank can load the state of any rank. A rank that loads a state saved by
        another rank loses the codecs' error feedback.

        Args:
            state: Result of `state_dict` with the same fragments.

        Raises:
            ValueError: The state belongs to another model, other fragments, or another outer optimizer.
            RuntimeError: `every` is a time, training has begun, and `finish` was not called.
        """
        self._exchanges.check_between()
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
            # Load the optimizer first: if it rejects a state that does not fit, nothing has changed yet.
            self.outer.load_state_dict(state["outer"])
        super().load_state_dict(state)
        with torch.no_grad():
            for (name, _), there in zip(named, self.anchor, strict=False):
                there.copy_(anchor[name])
        saved = zip(state["rounds"], state["under_way"], state["codecs"], strict=True)
        for fragment, (rounds, under_way, codecs) in zip(self._fragments, saved, strict=True):
            fragment.rounds = int(rounds)
            # Ranks may have loaded different states, so the next exchange compares the anchors.
            fragment.is_loaded = self.outer is not None
            fragment.exchange = None
            if under_way is not None:
                due, tensors, expected, loaded = under_way
                ahead = None if expected is None else Ahead(expected)
                alpha = self._exchange_settings.alpha
                ended = Completion.ended()
                fragment.exchange = Exchange(int(due), tensors, ended, alpha, ahead=ahead, loaded=set(loaded))
            for codec, one in zip(fragment.codecs, codecs, strict=True):
                if codec is not None and state["rank"] == self._comm.rank:
                    codec.load_state_dict(one)
        self._resumed = True

    def move_to(self, comm: Communicator) -> None:
        """Switch to the ranks of another communicator, such as the result of `comm.rebuild()`.

        Collective over the new communicator: ranks that join create their averager at the same time. Results that have
        arrived are applied, and unfinished exchanges are repeated, so this rank's training is not lost. If a rank has
        applied fewer results than another rank, for example because it is new, it continues from the anchor. The
        codecs' error feedback is lost.

        Args:
            comm: The new communicator.

        Raises:
            MismatchError: Ranks have different parameters or arguments.
        """
        # End the exchanges in flight and join the worker, so that from here on only this thread changes the fragments.
        self._disconnect()
        with torch.no_grad():
            for fragment in self._fragments:
                exchange = fragment.exchange
                if exchange is not None and exchange.done.is_completed() and exchange.done.exception() is None:
                    self._exchanges.apply(fragment, self._tensors)
                elif exchange is not None:
                    self._take_back(fragment, exchange)
                fragment.codecs = [codec and codec.clone() for codec in fragment.codecs]
                # Compare the anchors in the next exchange: a rank may have loaded weights that the other ranks have not
                # loaded.
                fragment.is_loaded = self.outer is not None
        self._connect(comm)
        self._follow_leader(is_new=False)

    def _follow_leader(self, *, is_new: bool) -> None:
        """Continue from the state of the rank with the most progress, unless all ranks' averagers are new. Collective.

        Both the constructor and `move_to` call this method: a rank that joins creates an averager while the other ranks
        move theirs.
        """
        rounds = sum(fragment.rounds for fragment in self._fragments)
        progress = self._comm.all_gather_object((_NEW if is_new else rounds, self.steps))
        # If several ranks have equal progress, all ranks choose the first of them.
        leader = progress.index(max(progress))
        rounds, steps = progress[leader]
        if rounds == _NEW:
            if self.anchor:
                advice = "un.broadcast_parameters(model, comm) makes them equal"
                assert_equal_tensors(self._known, self._comm, "parameters differ between ranks", advice)
            return
        state = self._comm.broadcast_object(self.state_dict() if self._comm.rank == leader else None, src=leader)
        # A rank that has taken no step may be new and have a different anchor, so it also loads the leader's state. It
        # loses nothing, because it has not trained.
        if progress[self._comm.rank][0] < rounds or (steps and not self.steps):
            self.load_state_dict(state)
            with torch.no_grad():
                for fragment in self._fragments:
                    fragment.samples = 0
                    for here, there in zip(self._tensors(fragment), fragment.anchor, strict=False):
                        here.copy_(there)
        self.steps: int = steps
        # Loading the model next, as `un.elastic.Recovery` does, must not replace the leader's anchor.
        self._resumed = True

    def _take_back(self, fragment: Fragment, exchange: Exchange) -> None:
        """Undo this rank's contribution to an exchange that failed, so that the next exchange includes it again."""
        fragment.exchange = None
        if exchange.share is not None and not exchange.loaded:
            fragment.samples += exchange.share.samples
        ahead = exchange.ahead
        if ahead is not None:
            parts = zip(self._tensors(fragment), fragment.anchor, ahead.own, ahead.expected, strict=False)
            for index, (here, there, own, expected) in enumerate(parts):
                # Training continued from the prediction, except in parameters that have been loaded with other values
                # since then.
                if index not in exchange.loaded:
                    # Undo the prediction: restore the values that this rank had before (the anchor minus the
                    # contribution), but keep the training since then.
                    here.add_(there - own - expected)


_NEW = -1
"""Progress of an averager that is being constructed: lower than the 0 of an averager that has applied no result."""


def floating(named: Named) -> Named:
    """Return the tensors that can be averaged: those with a floating-point or complex dtype."""
    return [(name, tensor) for name, tensor in named if tensor.is_floating_point() or tensor.is_complex()]


def _reduction(given: str | Reduction) -> Reduction:
    if isinstance(given, str):
        if given not in _REDUCTIONS:
            raise ValueError(f"unknown reduction {given!r}; known: {', '.join(_REDUCTIONS)}")
        return _REDUCTIONS[given]
    if not callable(given):
        raise TypeError(f"reduce must be a name or a function, not {type(given).__name__}")
    return given


def _staggered(schedule: Schedule, count: int) -> list[Schedule]:
    """Return the schedules of `count` fragments, evenly spaced within the interval."""
    if count == 1:
        return [schedule]
    if not isinstance(schedule, PeriodicSchedule):
        raise ValueError("several fragments need a number of steps in every=, of which each takes its part")
    return [replace(schedule, offset=i * schedule.n // count) for i in range(count)]


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
