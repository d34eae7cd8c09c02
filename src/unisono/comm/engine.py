"""Engine of one communicator: makes and runs its collectives, in the order of the calls."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from sys import _getframe
from threading import get_ident
from typing import Any

import torch
from torch.autograd.graph import increment_version

from unisono.collectives.arguments import Splits, make_call
from unisono.collectives.selection import Selection
from unisono.comm.agreement import Agreements
from unisono.comm.failures import Failures
from unisono.comm.plain_calls import PlainCalls
from unisono.comm.slow_rank import SlowRank
from unisono.comm.teardown import Teardown
from unisono.comm.tuner import Tuner
from unisono.core import clock
from unisono.core.call import Call, Fingerprint
from unisono.core.collective import Collective
from unisono.core.control import ControlPlane
from unisono.core.failure import raise_caused
from unisono.core.flight_recorder import NOT_THE_USERS, Activity, Place, callers_place, format_call, site_text
from unisono.core.group import Group
from unisono.core.hold import HOLD
from unisono.core.life import Life, Phase
from unisono.core.numbers import Status
from unisono.core.staging import BufferGuard, Staging
from unisono.core.tensors import numels
from unisono.core.threads import SerialWorker
from unisono.core.tracing import SINK, profiler, record_collective, record_message
from unisono.core.transport import FastPath, Options, Tensors, Transport
from unisono.core.types import PointToPoint, ReduceOp, Timeout, Work
from unisono.core.work import Completion, Deferred, resolve_timeout, seconds_left
from unisono.errors import ClosedError, CommError
from unisono.wrappers.trace import observed, waits_of

__all__ = ["Engine"]

# Saves an attribute lookup in the fast path, which checks the phase in every call.
_OPEN = Phase.OPEN


class Engine:
    """Progress engine of one communicator. Collectives run one at a time, in call order.

    A blocking collective runs in the caller's thread, on the transport's fast path if that path supports the call. An
    asynchronous collective runs in one helper thread, created on first use; a blocking collective called while the
    helper thread is busy is queued there, too.

    Communicators and pending works hold references to the engine. When the last reference is dropped without
    `close`, `ending` stops the threads.

    Args:
        failures: The communicator's `Failures`, which also holds its transport and control handle.
        options: Options of the transport.
        hosts: Name of each rank's host.
        check: The communicator's `check` option.

    Attributes:
        transport, control: The transport and control handle of `failures`; `wrap` replaces them.
        failures, options: As passed.
        group: The communicator's group.
        activity: This rank's activity.
        slow_rank: Finds the rank that holds up the other ranks.
        owner: The only thread that may use the communicator; None before the first call, and with `any_thread`.
        any_thread: Whether all threads may use the communicator.
        life: Phase, which determines what happens to the next call.
        agreements: Values that the next collective compares.
        checked: Whether ranks compare their collectives.
        uneven_batches: Whether a sampler gives ranks batches of unequal sizes, and no warning has been issued about it
            yet.
        fast_path: The transport's fast path, or `PlainCalls`; None without a fast path.
        selection: Chooses algorithms.
        tuner: Cost table for "auto".
        parent: The engine of the parent communicator, which must outlive this one.
        ending: Teardown that releases all resources.
    """

    def __init__(self, failures: Failures, options: Options, hosts: Sequence[str], *, check: str) -> None:
        self.failures: Failures = failures
        self.transport: Transport = failures.transport
        self.control: ControlPlane = failures.control
        self.options = options
        self.activity: Activity = failures.activity
        self.group: Group = self.activity.group
        self.slow_rank: SlowRank = SlowRank(self.activity)
        self.owner: int | None = None
        self.any_thread = False
        self.life: Life = self.activity.life
        self.uneven_batches = False
        self.checked: bool = check != "off"
        self.agreements: Agreements = Agreements(failures, checked=self.checked)
        self.fast_path: FastPath | None = self._fast_path_of(self.transport)
        self.tuner: Tuner = Tuner(self.transport, self.control, options, hosts)
        self.selection: Selection = Selection(
            self.transport, options.chunk_bytes, deterministic=options.deterministic, machine=self.tuner.machine
        )
        self._staging = BufferGuard if check == "full" else Staging
        self._streams: dict[torch.device, torch.Stream] = {}
        self._sink = SINK
        self._limit_s = options.timeout_s
        # Threads that are inside a collective: a signal handler in such a thread must not start another collective.
        self._inside: set[int] = set()
        self._helper = SerialWorker(f"unisono {self.group.name} rank {self.group.rank}")
        self._pending = 0
        self._lock = threading.Lock()
        self.parent: Engine | None = None
        self.ending: Teardown = Teardown(failures, self._helper, options.timeout_s)
        # Don't run this finalizer at process exit, when the control plane's handle closes communicators that are still
        # open.
        finalizer = weakref.finalize(self, self.ending.drop)
        finalizer.atexit = False
        HOLD.add(self)

    def wrap(self, transport: Transport, control: ControlPlane) -> None:
        """Replace the transport and control plane, for example with a recording wrapper."""
        self.transport = self.failures.transport = transport
        self.control = self.failures.control = self.tuner.control = control
        self.fast_path = self._fast_path_of(transport)

    def _fast_path_of(self, transport: Transport) -> FastPath | None:
        if self.options.deterministic:
            # The fast path sums in a different order than deterministic collectives do.
            return None
        plain = transport.plain()
        return transport.fast_path if plain is None else PlainCalls(transport, plain, self.activity)

    def measured(self, what: str, make: Callable[[], Any]) -> Any:
        """Call `make` through `ControlPlane.measured`, so that a replay gets the recorded value."""
        return self.control.measured(self.group, what, make)

    # -- whether calls can be made -------------------------------------------------------------
    def enter(self, operation: str) -> None:
        """Raise unless this thread may use the communicator and the communicator still works."""
        if self.owner != get_ident() and not self.any_thread:
            self.own(operation)
        if self.life.phase is not _OPEN:
            # Check in a loop, because a debugger may hold the ranks again before this thread has run.
            while self.life.phase is Phase.HELD:
                HOLD.wait(self.activity)
            self.failures.check(operation)

    def own(self, operation: str) -> None:
        """Raise unless this thread may use the communicator; the first thread to use it becomes the owner."""
        if self.any_thread:
            return
        here = get_ident()
        if self.owner is None:
            self.owner = self.activity.owner = here
        if self.owner != here:
            error = CommError(
                f"this communicator belongs to another thread than {threading.current_thread().name!r}; "
                "call release_thread() there first, or use dup() for a second communicator"
            )
            raise self.failures.with_context(error, operation)

    def release(self, operation: str, *, any_thread: bool) -> None:
        """Release the communicator to all threads, or only to the next thread that uses it, which becomes the owner."""
        self.own(operation)
        self.owner = None
        self.any_thread = any_thread
        if not any_thread:
            # Reports show the owner's stack, and a thread that has handed over the communicator is no longer the owner.
            self.activity.owner = 0

    # -- the fast path: 1 us per call ----------------------------------------------------------
    def run_fast(
        self,
        what: Collective,
        output: Tensors,
        input: Tensors,
        op: object,
        root: int | None,
        algorithm: str | None,
        timeout: Timeout | None,
        /,
        async_op: bool,
    ) -> Work | None:
        """Run a collective, with arguments as for `run`; a blocking one takes the transport's fast path if possible."""
        fast = self.fast_path
        here = get_ident()
        if (
            async_op
            or fast is None
            or (self.owner != here and not self.any_thread)
            or self._pending
            or self._inside
            or self.agreements.waiting
            or self.life.phase is not _OPEN
            or profiler._is_profiler_enabled
        ):
            return self.run(what, output, input, op, root, algorithm, timeout, async_op)
        limit = self._limit_s if timeout is None else resolve_timeout(timeout)
        caller = _getframe(2)
        activity = self.activity
        while caller.f_code.co_filename.startswith(NOT_THE_USERS) and caller.f_back is not None:
            caller = caller.f_back
        detail = str(op or "") if root is None else f"root {root}"
        record = activity.enter(what.name, activity.calls + 1, detail, (caller.f_code, caller.f_lasti))
        self._inside.add(here)
        try:
            status = fast.try_collective(what, output, input, op, root, algorithm, activity.since + limit)
            if status is Status.MISMATCH:
                call = self._make((activity.calls + 1, record[3]), what, output, input, op, root, algorithm, timeout)
                fast.mismatch(call.fingerprint)
            if status is Status.OK:
                # Transports write without torch's functions, so increment the tensor's version here.
                if output is not None and (root is None or what.writes(self.group.rank, root)):
                    increment_version(output)  # type: ignore[arg-type]  # no fast path accepts other buffers
                activity.calls += 1
                activity.keep(record)
                if (sink := self._sink.get()) is not None:
                    record_collective(sink, activity, what, (output, input), op, root)
        except BaseException as error:
            if _refuses(error):
                raise
            # Report even an interrupt, because other ranks have seen part of the collective.
            activity.note(*record[:4])
            raise_caused(self.failures.report(error, record[0], record[1]), error)
        finally:
            self._inside.discard(here)
            activity.leave()
        # With any other status, the fast path has done nothing.
        return None if status is Status.OK else self.run(what, output, input, op, root, algorithm, timeout)

    def try_message(self, name: str, tensor: Any, peer: Any, tag: int, timeout: Timeout | None, /) -> bool:
        """Send or receive ("send", "recv") on the fast path; return False, with no effect, if it can't do so."""
        fast = self.fast_path
        here = get_ident()
        if fast is None or self.owner != here or self._inside or self.life.phase is not _OPEN:
            return False
        if profiler._is_profiler_enabled or not fast.takes(tensor, peer, tag):
            return False
        limit = self._limit_s if timeout is None else resolve_timeout(timeout)
        caller = _getframe(2)
        activity = self.activity
        while caller.f_code.co_filename.startswith(NOT_THE_USERS) and caller.f_back is not None:
            caller = caller.f_back
        detail = f"{'to' if name == 'send' else 'from'} rank {peer}{f', tag {tag}' if tag else ''}, {tensor.nbytes} B"
        awaited = activity.post(name, peer, tag)
        record = activity.enter(name, None, detail, (caller.f_code, caller.f_lasti), (awaited,))
        self._inside.add(here)
        try:
            status = fast.try_message(name, tensor, peer, tag, activity.since + limit)
            if status is Status.OK and (sink := self._sink.get()) is not None:
                record_message(sink, activity, awaited, tag, tensor.nbytes)
        except BaseException as error:
            if _refuses(error):
                activity.posted[awaited[:3]] -= 1
                raise
            raise_caused(self.failures.report(error, name, activity.messages + 1), error)
        finally:
            self._inside.discard(here)
            activity.leave()
        if status is Status.OK:
            activity.messages += 1
            activity.keep_message(record)
            if name == "recv":
                increment_version(tensor)
        else:
            activity.posted[awaited[:3]] -= 1
        return status is Status.OK

    # -- calls ---------------------------------------------------------------------------------
    def staging(self) -> Staging:
        """Return a new `Staging`, which makes a call's tensors one-dimensional and contiguous."""
        return self._staging(self.transport.host_staged, self._streams)

    def _make(
        self,
        at: tuple[int, Place],
        what: Collective,
        output: Tensors,
        input: Tensors,
        op: object,
        root: int | None,
        algorithm: str | None,
        timeout: Timeout | None,
        splits: Splits = (None, None),
        lengths: tuple[int, ...] = (),
        origin: tuple[int, str] | None = None,
        scale: float | None = None,
    ) -> Call:
        """Return a `Call` with this number and call site; raise if this rank can tell that the call is invalid."""
        group = self.group
        transport = self.transport
        call, like = make_call(
            what,
            output,
            input,
            op,
            root,
            rank=group.rank,
            size=group.size,
            devices=transport.devices,
            staging=self._staging(transport.host_staged, self._streams),
            splits=splits,
            lengths=lengths,
            scale=scale,
        )
        limit = self._limit_s if timeout is None else resolve_timeout(timeout)
        algorithm, steps = self.selection.choose(call, algorithm)
        return call._replace(
            fingerprint=_fingerprint(what, call, like, at, algorithm, origin),
            steps=steps,
            timeout=limit,
            checked=self.checked,
            inference=torch.is_inference_mode_enabled(),
        )

    def block(
        self,
        what: Collective,
        output: Tensors = None,
        input: Tensors = None,
        *,
        op: object = None,
        root: int | None = None,
        algorithm: str | None = None,
        timeout: Timeout | None = None,
        lengths: tuple[int, ...] = (),
        origin: tuple[int, str] | None = None,
    ) -> None:
        """Run a collective, with arguments as for `run`, and return when it is done; use the fast path if possible."""
        if lengths or origin is not None:
            self.run(what, output, input, op, root, algorithm, timeout, lengths=lengths, origin=origin)
        else:
            self.run_fast(what, output, input, op, root, algorithm, timeout, async_op=False)

    @property
    def is_inside(self) -> bool:
        """Whether this thread is already inside a collective, as can happen in a signal handler."""
        return get_ident() in self._inside

    def _called_inside(self, operation: str) -> CommError:
        outer = format_call(*self.activity.now[:4]) if self.activity.now else "another collective"
        return self.failures.with_context(
            CommError(
                f"{operation} was called inside {outer}, as by a signal handler. Set a flag in the handler, and make "
                "the call after the outer call has returned; un.stop does so for a stop at the same step on all ranks"
            ),
            operation,
        )

    def run(
        self,
        what: Collective,
        output: Tensors,
        input: Tensors,
        op: object,
        root: int | None,
        algorithm: str | None,
        timeout: Timeout | None,
        async_op: bool = False,
        *,
        splits: Splits = (None, None),
        lengths: tuple[int, ...] = (),
        origin: tuple[int, str] | None = None,
        scale: float | None = None,
        then: Callable[..., Call] | None = None,
    ) -> Work | None:
        """Run a collective, and return None when it is done; or start it, and return its work.

        Args:
            what: The collective.
            output, input: The caller's tensors to write to and read from.
            op, root, algorithm, timeout: The caller's arguments.
            async_op: Whether to return without waiting.
            splits, lengths: See `make_call`.
            origin: In a backward pass, the number and source line of this collective's counterpart in the forward pass.
            scale: Factor for each contribution to a sum.
            then: Function that is called when the first half of a two-part collective is done, and returns the call for
                the second half. Its argument is a function that makes a `Call` from arguments like those of `run`.
        """
        if self.owner != get_ident() or self.life.phase is not _OPEN:
            self.enter(what.name)
        activity = self.activity
        at = activity.calls + 1, callers_place()
        call = self._make(at, what, output, input, op, root, algorithm, timeout, splits, lengths, origin, scale)
        if self.is_inside:
            raise self._called_inside(what.name)
        # Change the pending values only after all checks, because a rejected collective must leave them unchanged.
        if scale is not None and self.checked:
            self.agreements.add(scale, "scale")
        fingerprint = call.fingerprint
        if self.agreements.waiting and (agreed := self.agreements.take(fingerprint.call)) is not None:
            fingerprint = fingerprint._replace(call=fingerprint.call + 1)
            call = call._replace(agreed=agreed, fingerprint=fingerprint)
        activity.note(what.name, fingerprint.call + (then is not None), fingerprint, fingerprint.site)
        transport, waiting = observed(self.transport, call, starts=async_op)
        with waiting:
            starts = async_op and call.steps is None and call.agreed is None and then is None and not self._pending
            if starts and transport.starts(call):
                work = self._start(call, transport)
                return waits_of(self.transport.returned(work), what.name, self.group)
            with self._lock:
                queued = async_op or self._pending > 0
                if queued:
                    self._pending += 1
            if not queued:
                self._perform(call, transport, then)
                return None
            call.staging.follow((*call.inputs, *call.outputs))
            # If the collective times out, a hang report names the missing ranks. Give the report time: wait one
            # default timeout longer than the collective may take.
            done = _Queued((1 if then is None else 2) * call.timeout + self.options.timeout_s, activity)
            self._helper.run(partial(self._progress, call, transport, then, done))
            if not async_op:
                done.wait()
                return None
        return waits_of(self.transport.returned(done), what.name, self.group)

    def flush_agreements(self, barrier: Collective, timeout: Timeout | None) -> None:
        """Compare the pending values now. Collective.

        A mismatch raises on every rank, so it doesn't break the communicator.
        """
        limit = self._limit_s if timeout is None else resolve_timeout(timeout)
        mine = self.agreements.take(self.activity.calls) or Fingerprint(self.activity.calls, "agree")
        # The barrier detects ranks that call a different collective.
        self.block(barrier, timeout=limit)
        self.agreements.compare(mine, limit)

    def _perform(self, call: Call, transport: Transport, then: Callable[..., Call] | None = None) -> None:
        deadline = clock.now() + call.timeout
        with self._carrying_out(call):
            self._compare(call, transport, deadline)
            call.staging.begin()
            work = transport.run(call)
            work.wait(seconds_left(deadline))
            call.staging.end()
            failed = work.exception()
            if failed is not None:
                # If a torch group uses streams, its work completes only after `work.wait` has returned, so check for a
                # failure here.
                raise failed
        if then is not None:
            with self._carrying_out(call, refusals=False):
                second = then(partial(self._make, (call.fingerprint.call + 1, call.fingerprint.site)))
            self._perform(second, transport)

    def _compare(self, call: Call, transport: Transport, deadline: float) -> None:
        """Compare the collective and the pending values on all ranks; then the collective may write to memory."""
        if call.agreed is not None:
            # This call is only compared, never run. Set `steps`, because some transports compare a call without steps
            # only later, for example in `run`.
            transport.compare(Call("barrier", fingerprint=call.agreed, steps=_no_steps), deadline)
        transport.compare(call, deadline)

    def _start(self, call: Call, transport: Transport) -> Work:
        """Start a collective on a transport that makes progress by itself; a thread that waits for it completes it."""
        with self._carrying_out(call):
            self._compare(call, transport, clock.now() + call.timeout)
            call.staging.begin()
            work = transport.run(call)

        def complete(deadline: float) -> None:
            with self._carrying_out(call):
                work.wait(seconds_left(deadline))
                call.staging.end()

        # If the group has failed, the work counts as completed, because a wait immediately raises the first cause.
        return Deferred(complete, call.timeout, lambda: work.is_completed() or self.life.cause is not None)

    @contextmanager
    def _carrying_out(self, call: Call, *, refusals: bool = True) -> Iterator[None]:
        """Mark this rank as inside the collective, and report a failure inside the `with` block to every rank.

        Without `refusals`, an error about invalid arguments is not reported, because every rank raises it.
        """
        here = get_ident()
        fingerprint = call.fingerprint
        activity = self.activity
        self._inside.add(here)
        activity.enter(fingerprint.operation, fingerprint.call, fingerprint, fingerprint.site)
        try:
            with torch.no_grad(), call.staging.entered():
                yield
        except BaseException as error:
            refused = not refusals and _refuses(error)
            raise_caused(
                error if refused else self.failures.report(error, fingerprint.operation, fingerprint.call), error
            )
        finally:
            self._inside.discard(here)
            activity.leave()

    def _progress(self, call: Call, transport: Transport, then: Callable[..., Call] | None, work: Completion) -> None:
        """Run a queued collective in the helper thread."""
        error: BaseException | None = None
        self.activity.in_background = True
        begun_s = clock.now()
        try:
            # A collective that was started before `close` still completes, unless another group has replaced this one.
            if self.life.cause is not None or self.life.phase is Phase.RETIRED:
                self.failures.check(call.fingerprint.operation)
            with torch.inference_mode(call.inference):
                self._perform(call, transport, then)
        except BaseException as raised:
            error = raised
        with self._lock:
            self._pending -= 1
        self.activity.in_background = False
        # Count the helper thread's time as time outside collectives, because the program does other work while a queued
        # collective runs. `_Queued.wait` subtracts the time for which the program waits.
        self.activity.outside_s += clock.now() - begun_s
        work.complete(error)

    # -- end -----------------------------------------------------------------------------------
    def settle(self) -> None:
        """Do the pending comparisons before closing; raise an error for a mismatch that no collective has raised."""
        if not self.life.closed:
            self.transport.settle()
        self.failures.settle()
        if self.parent is None:
            self.agreements.compare_at_close()

    def retire(self) -> None:
        """Accept no more calls, and abort those in flight, because another group replaces this one."""
        if not self.life.change("retire"):
            return
        # This also disarms the finalizer.
        self.ending.over = True
        self.transport.abort(ClosedError("the communicator was rebuilt; use the new communicator"))
        self._helper.end()
        self.transport.close()

    def replace(self, other: Engine) -> None:
        """Replace a retired engine; its subgroups then live as long as this engine."""
        if other.parent is not None:
            self.set_parent(other.parent)
        other.parent = self
        self.ending.inherit(other.ending)

    def set_parent(self, whole: Engine) -> None:
        """Become a subgroup: close no later than the parent, and keep the parent alive until then."""
        self.parent = whole
        if self.group.members == whole.group.members:
            self.agreements.share(whole.agreements)
        whole.ending.adopt(self.ending)


class _Queued(Completion):
    """Work for a collective that runs in the helper thread. Time in `wait` counts as time inside a collective."""

    def __init__(self, timeout_s: float, activity: Activity) -> None:
        super().__init__(timeout_s)
        self._activity = activity

    def wait(self, timeout: Timeout | None = None) -> None:
        begun_s = clock.now()
        try:
            super().wait(timeout)
        finally:
            self._activity.outside_s -= clock.now() - begun_s


def _refuses(error: BaseException) -> bool:
    """Return whether an error means that a collective's arguments are invalid, and that nothing has been done yet."""
    return isinstance(error, TypeError | ValueError) and not isinstance(error, CommError)


def _no_steps(transport: PointToPoint, call: Call, deadline: float) -> None:
    pass


def _fingerprint(
    what: Collective,
    call: Call,
    like: torch.Tensor | None,
    at: tuple[int, Place],
    algorithm: str,
    origin: tuple[int, str] | None,
) -> Fingerprint:
    """Return a collective's fingerprint; `like` is a tensor with the collective's dtype, device and shape."""
    op = ReduceOp.AVG if call.average else call.op
    read: tuple[int, ...] = ()
    written: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    if not what.in_place:
        read = numels(call.inputs)
        written = numels(call.outputs)
        counts = call.lengths or what.compared_counts(read, written)
    elif like is not None:
        counts = (like.numel(),)
    return Fingerprint(
        call=at[0],
        operation=what.name,
        op=None if op is None else op.value,
        root=call.root,
        dtype=None if like is None else str(like.dtype).removeprefix("torch."),
        counts=counts,
        device=None if like is None else like.device.type,
        algorithm=algorithm,
        adjoint_of=None if origin is None else origin[0],
        sends=read if what.pairwise else (),
        receives=written if what.pairwise else (),
        shape=None if like is None else tuple(like.shape),
        site=at[1] if origin is None else f"{site_text(at[1])}, backward of {origin[1]}",
    )
