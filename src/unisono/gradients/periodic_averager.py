"""The engine of periodic averaging: fragments that travel when they are due, a reduction, and an update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypedDict
from weakref import finalize

import torch

from unisono.checkpoint.divergence import assert_equal_tensors
from unisono.communicator import Communicator, engine_of
from unisono.compression.codec import Codec, Spec
from unisono.core.staging import current_streams, entered, wait_for
from unisono.core.threads import SerialWorker
from unisono.core.work import Completion
from unisono.gradients.periodic import PeriodicAction, PeriodicSchedule, Schedule, schedule_of, whole_number
from unisono.gradients.reducer import codec_for
from unisono.gradients.robust import ClippedMean, TrimmedMean
from unisono.gradients.weights import ErrorContext
from unisono.utils.flatten import MIB, buckets, flat_apply
from unisono.utils.parameters import Model, Named, check_parameters, named_tensors

__all__ = ["ExchangeOptions", "Fragment", "Outer", "PeriodicAverager", "Reduction", "floating", "mean"]

_CALLS = 4
"""Collectives that the average of one message makes at most, each of which has the communicator's timeout."""

Outer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
"""Maker of an outer optimizer, from the tensors of the anchor."""


class Reduction(Protocol):
    """Reduction of one flat message over the ranks, in place, and the same function on all of them."""

    def __call__(self, flat: torch.Tensor, comm: Communicator, turn: int, /) -> object: ...


class ExchangeOptions(TypedDict, total=False):
    """Arguments of `PeriodicAverager` that its settings pass on."""

    fragments: int | Sequence[Sequence[str]]
    reduce: str | Reduction
    compression: Spec | None
    overlap_steps: int
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
    """An exchange under way: this rank's contributions, which are the result when it is done.

    Attributes:
        due: The step in which the result is applied.
        tensors: One for each parameter of the fragment.
        done: Completed by the thread that reduces.
        alpha: As for `PeriodicAverager`.
        in_place: Whether the contributions are the parameters themselves, so that nothing is left to apply.
        sent: The parameters when the exchange began, if what they learn meanwhile is added to the result.
        streams: Streams of accelerators on which the result is computed.
    """

    due: int
    tensors: list[torch.Tensor]
    done: Completion
    alpha: float | None
    in_place: bool = False
    sent: list[torch.Tensor] | None = None
    streams: list[torch.Stream] = field(default_factory=list)


@dataclass(eq=False)
class Fragment:
    """Parameters that travel together.

    Attributes:
        members: Their numbers among the floating-point ones.
        due: Whether they are sent after a step.
        anchor: Their part of the anchor, if there is one.
        codecs: One for each message, None where it is sent as it is.
        rounds: Number of exchanges applied.
        exchange: The one under way.
    """

    members: list[int]
    due: Schedule
    anchor: list[torch.Tensor]
    codecs: list[Codec | None] = field(default_factory=list)
    rounds: int = 0
    exchange: _PendingExchange | None = None


class PeriodicAverager(PeriodicAction):
    """Engine of periodic averaging, of which `LocalSGD`, `DiLoCo` and `Gossip` are settings.

    Ranks train independently. When a fragment of the parameters is due, this rank's contribution is sent and reduced,
    and the result is applied `overlap_steps` steps later. Without `outer`, parameters are averaged themselves. With
    `outer`, the contribution is the change from a common anchor; the outer optimizer steps the anchor with the mean
    change as its gradient, and ranks continue from there. Construction is collective, and so is each `step` in which a
    fragment is due or applied.

    Args:
        model: A module, or its parameters. Integer ones stay unchanged.
        comm: The ranks that take part.
        every: A number of steps, an `every(...)`, or a function of the step's number (from 1).
        buffers: Also average a module's floating-point buffers.
        outer: Maker of the outer optimizer, from the anchor's tensors. Ranks must start from equal parameters then.
        fragments: Number of parts of about equal bytes, in the order of the parameters; or for each part a list of
            names, of parameters or of modules that hold them ("layers.3"). Part k of p is sent k / p of an interval
            after part 0 (Douillard et al., Streaming DiLoCo, 2025). More than one needs a number of steps in `every`.
        reduce: "mean", "trimmed_mean", "median", "clipped_mean" (see `TrimmedMean`, `ClippedMean`); or a function of a
            flat tensor that it changes in place, a communicator, and the number of the fragment's exchange (from 0).
            With `outer` it gives all ranks the same.
        compression: A codec of `un.compression`, which computes the mean; needs `outer`. Complex parameters are sent as
            they are.
        overlap_steps: Steps that a result may take to arrive while training continues, at most until the fragment is
            due again. 0: each exchange is waited for.
        alpha: Share of this rank's own parameters when a result is applied, from 0 to less than 1; Streaming DiLoCo
            has 0.5. None: the result, plus what this rank has learnt since it sent.
        anchor_dtype: Of the anchor's real tensors. None: float32, or the parameter's dtype if that is wider.
        bucket_cap_mb: Size of a message in MiB.
        settings: Other values that must be the same on all ranks, by name.

    Raises:
        MismatchError: Ranks have different parameters or arguments.
        ValueError: An argument is out of range, or does not go with the others; nothing was sent.
        TypeError: A number of steps or of fragments is not an int.

    Attributes:
        anchor: With `outer`, for each floating-point parameter its value when all ranks were last equal; else empty.
        outer: The outer optimizer; its learning rate may be scheduled as any other's.

    Cost: each interval one average of the parameters' elements, in the anchor's dtype if there is one. Memory: with
    `outer` the anchor, the outer optimizer's state, and once more the fragments under way; with `overlap_steps` and
    without `alpha` another copy of these.

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
        every: int | Schedule = 8,
        *,
        buffers: bool = False,
        outer: Outer | None = None,
        fragments: int | Sequence[Sequence[str]] = 1,
        reduce: str | Reduction = "mean",
        compression: Spec | None = None,
        overlap_steps: int = 0,
        alpha: float | None = None,
        anchor_dtype: torch.dtype | None = None,
        bucket_cap_mb: float = 25,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        model = model if isinstance(model, torch.nn.Module) else named_tensors(model)
        named = floating(named_tensors(model, buffers=buffers))
        check_parameters(named)
        whole_number("overlap_steps", overlap_steps, 0)
        if alpha is not None and not 0 <= alpha < 1:
            raise ValueError(f"alpha must be None or from 0 to less than 1, not {alpha}")
        if compression is not None and (outer is None or reduce != "mean"):
            raise ValueError(
                "a codec sends changes from an anchor, and computes their mean: compression= needs outer=, such as "
                "DiLoCo's, and goes with reduce='mean' only"
            )
        if anchor_dtype is not None and not anchor_dtype.is_floating_point:
            raise ValueError(f"anchor_dtype must be a dtype of real numbers, not {anchor_dtype}")
        self._lag = overlap_steps
        self._alpha = alpha
        self._reduce = _reduction(reduce)
        self._cap = int(bucket_cap_mb * MIB)
        self.anchor = [_wide(t, anchor_dtype) for _, t in named] if outer is not None else []
        self.outer = None if outer is None else outer(self.anchor)
        codec = codec_for(compression)
        self._fragments: list[Fragment] = []
        for members, due in _divide(named, fragments, schedule_of(every)):
            fragment = Fragment(members, due, [self.anchor[i] for i in members] if self.anchor else [])
            if codec is not None:
                messages = self._messages(fragment.anchor)
                fragment.codecs = [codec.clone() if m[0].is_floating_point() else None for m in messages]
            self._fragments.append(fragment)
        shared = {
            "outer": _described(self.outer),
            "fragments": repr(fragments),
            "reduce": reduce if isinstance(reduce, str) else getattr(reduce, "__qualname__", repr(reduce)),
            "compression": repr(codec),
            "overlap_steps": overlap_steps,
            "alpha": alpha,
            "anchor_dtype": str(anchor_dtype),
            "bucket_cap_mb": bucket_cap_mb,
        }
        super().__init__(model, comm, every, buffers=buffers, settings={**shared, **(settings or {})})
        self._limit_s = _CALLS * engine_of(self._comm).options.timeout_s
        self._worker = SerialWorker(f"unisono {type(self).__name__} rank {comm.rank}")
        self._comm.before_close(partial(_end, self._worker, self._limit_s * len(self._fragments)))
        finalize(self, self._worker.end)
        if overlap_steps:
            self._comm.allow_any_thread()
        try:
            if self.anchor:
                advice = "un.broadcast_parameters(model, comm) makes them equal"
                assert_equal_tensors(named, self._comm, "parameters differ between ranks", advice)
        except Exception:
            # Whatever it was is raised again; the communicator that was made must not stay open.
            self._comm.close()
            raise

    # -- steps ---------------------------------------------------------------------------------
    def step(self) -> bool:
        """Count a step, send the fragments that are due, and apply the results that are. Call it after each step.

        Collective where a fragment is due or applied.

        Returns: Whether a result was applied.

        Raises:
            CommError: An exchange failed, also one in the background; its notes say which. Every later step raises it.
        """
        self.steps += 1
        applied = False
        with torch.no_grad():
            for fragment in self._fragments:
                if fragment.exchange is not None and fragment.exchange.done.exception() is not None:
                    fragment.exchange.done.wait()
            for fragment in self._fragments:
                if fragment.due(self.steps):
                    applied |= self._apply(fragment)
                    self._start(fragment, self._lag, self._alpha)
            for fragment in self._fragments:
                if fragment.exchange is not None and fragment.exchange.due <= self.steps:
                    applied |= self._apply(fragment)
        return applied

    def finish(self) -> None:
        """Wait for the exchanges under way, and apply their results now. Collective.

        Raises:
            CommError: An exchange failed.
        """
        with torch.no_grad():
            for fragment in self._fragments:
                self._apply(fragment)

    def _act(self) -> None:
        """Exchange all fragments now, and continue from the results: without a share of this rank's own."""
        self.finish()
        for fragment in self._fragments:
            self._start(fragment, 0, None)
            self._apply(fragment)

    def _tensors(self, fragment: Fragment) -> list[torch.Tensor]:
        """The tensors of a fragment."""
        named = floating(self.named)
        return [named[i][1].detach() for i in fragment.members]

    # -- an exchange ---------------------------------------------------------------------------
    def _start(self, fragment: Fragment, lag: int, alpha: float | None) -> None:
        """Begin an exchange: in another thread if its result may lag."""
        if (failure := self._comm.exception()) is not None:
            raise failure.locate(rank=self._comm.rank, size=self._comm.size, operation="all_reduce")
        here = self._tensors(fragment)
        in_place = self.outer is None and not lag and not alpha
        if self.outer is None:
            given = here if in_place else [p.clone() for p in here]
        else:
            # Ranks have started from the anchor in the parameter's dtype: what rounding took off is no change.
            given = [a.to(p.dtype).to(a.dtype) - p.to(a.dtype) for a, p in zip(fragment.anchor, here, strict=True)]
        # The exchanges of all fragments may be under way before it.
        done = Completion(self._limit_s * len(self._fragments) * len(self._messages(given)))
        streams = current_streams(p.device for p in given) if lag else []
        own = [torch.Stream(device=stream.device) for stream in streams]
        sent = [p.clone() for p in here] if lag and alpha is None else None
        exchange = _PendingExchange(self.steps + lag, given, done, alpha, in_place, sent, own)
        task = partial(self._exchange, fragment, exchange, streams)
        if lag:
            self._worker.run(task)
        else:
            task()
        # Only what was started is waited for.
        fragment.exchange = exchange

    def _exchange(self, fragment: Fragment, exchange: _PendingExchange, after: list[torch.Stream]) -> None:
        """Reduce the contributions, in one message after another, behind what is queued on streams."""
        error: BaseException | None = None
        what = f"averaging fragment {self._fragments.index(fragment)}, whose result is for step {exchange.due}"
        try:
            with torch.no_grad(), ErrorContext(what), entered(exchange.streams):
                wait_for(after)
                for index, message in enumerate(self._messages(exchange.tensors)):
                    codec = fragment.codecs[index] if fragment.codecs else None
                    shapes = [t.shape for t in message]
                    flat_apply(message, partial(self._reduce_message, codec, shapes, fragment.rounds))
        except BaseException as raised:
            error = raised
        exchange.done.complete(error)

    def _reduce_message(self, codec: Codec | None, shapes: list[torch.Size], turn: int, memory: torch.Tensor) -> None:
        flat = memory.detach().view(-1)
        if codec is None:
            self._reduce(flat, self._comm, turn)
        else:
            codec.average(flat, self._comm, shapes)

    def _apply(self, fragment: Fragment) -> bool:
        """Wait for a fragment's exchange, and apply the result; return False if none is under way."""
        exchange = fragment.exchange
        if exchange is None:
            return False
        exchange.done.wait()
        wait_for(exchange.streams)
        fragment.exchange = None
        fragment.rounds += 1
        if exchange.in_place:
            return True
        results = exchange.tensors
        if self.outer is not None:
            for there, change in zip(fragment.anchor, results, strict=True):
                there.grad = change
            self.outer.step()
            self.outer.zero_grad()
            results = fragment.anchor
        for index, (here, there) in enumerate(zip(self._tensors(fragment), results, strict=True)):
            if exchange.sent is not None:
                here.copy_(there + (here - exchange.sent[index]))
            else:
                here.copy_(torch.lerp(there, here.to(there.dtype), exchange.alpha) if exchange.alpha else there)
        return True

    def _messages(self, tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        return list(buckets(tensors, self._cap))

    # -- state and end -------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the state from which to resume. Waits for the exchanges under way; tensors are not copied.

        It is the same on all ranks, except for codecs, for `Gossip`, and for exchanges under way without `alpha`: put
        it into a checkpoint as `un.checkpoint.PerRank` then.
        """
        state = {**super().state_dict(), "rank": 0, "fragments": [], "rounds": [], "under_way": [], "codecs": []}
        named = floating(self.named)
        for fragment in self._fragments:
            exchange = fragment.exchange
            if exchange is not None:
                exchange.done.wait()
                wait_for(exchange.streams)
            state["fragments"].append([named[i][0] for i in fragment.members])
            state["rounds"].append(fragment.rounds)
            state["under_way"].append(exchange and [exchange.due, exchange.tensors, exchange.sent])
            state["codecs"].append([codec and codec.state_dict() for codec in fragment.codecs])
        if any(fragment.codecs for fragment in self._fragments):
            state["rank"] = self._comm.rank
        if self.outer is not None:
            state["anchor"] = {name: there for (name, _), there in zip(named, self.anchor, strict=True)}
            state["outer"] = self.outer.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume where a job stopped; load the model's own parameters as usual. Every rank loads its own state.

        Where there are other ranks now, they load that of any rank: what a codec still owed to a rank is loaded by that
        rank only, and lost otherwise.

        Args:
            state: A result of `state_dict` with the same fragments.

        Raises:
            ValueError: The state is of another model, of other fragments, or of another outer optimizer.
        """
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
            # The optimizer refuses what does not fit before it changes anything.
            self.outer.load_state_dict(state["outer"])
        super().load_state_dict(state)
        with torch.no_grad():
            for (name, _), there in zip(named, self.anchor, strict=False):
                there.copy_(anchor[name])
        saved = zip(state["rounds"], state["under_way"], state["codecs"], strict=True)
        for fragment, (rounds, under_way, codecs) in zip(self._fragments, saved, strict=True):
            fragment.rounds = int(rounds)
            fragment.exchange = None
            if under_way is not None:
                due, tensors, sent = under_way
                fragment.exchange = _PendingExchange(int(due), tensors, Completion.ended(), self._alpha, sent=sent)
            for codec, one in zip(fragment.codecs, codecs, strict=True):
                if codec is not None and state["rank"] == self._comm.rank:
                    codec.load_state_dict(one)


def _end(worker: SerialWorker, limit_s: float) -> None:
    worker.end()
    worker.join(limit_s)


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
    """Return an optimizer's class and settings as text that is the same on all ranks."""
    if optimizer is None:
        return "None"
    settings = {k: v for k, v in optimizer.defaults.items() if isinstance(v, bool | int | float | str | tuple)}
    return f"{type(optimizer).__name__}({', '.join(f'{key}={value}' for key, value in settings.items())})"


def _divide(
    named: Named, fragments: int | Sequence[Sequence[str]], schedule: Schedule
) -> list[tuple[list[int], Schedule]]:
    """Return the numbers of each fragment's parameters, and its schedule: at equal distances within the interval."""
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
