"""Engine of one communicator: creates and runs its collectives, and keeps the first cause of a failure."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from sys import _getframe
from threading import get_ident
from typing import Any

import torch
from torch.autograd.graph import increment_version

from unisono.collectives.arguments import Splits, make_call
from unisono.collectives.selection import Selection
from unisono.comm.agreement import Agreements
from unisono.comm.phase import Event, Life, Phase
from unisono.comm.plain_calls import PlainCalls
from unisono.comm.slow_rank import SlowRank
from unisono.comm.teardown import Teardown
from unisono.comm.tuner import Tuner
from unisono.core import clock
from unisono.core.call import Agreed, Call, Fingerprint, disagreement
from unisono.core.collective import Collective
from unisono.core.control import ControlPlane
from unisono.core.failure import Cause, error_of, raise_caused, text_of, to_cause
from unisono.core.flight_recorder import NOT_THE_USERS, Activity, Place, Record, callers_place, format_call, site_text
from unisono.core.forks import invalidate_after_fork
from unisono.core.group import Group
from unisono.core.hold import HOLD
from unisono.core.numbers import Status
from unisono.core.staging import BufferGuard, Staging
from unisono.core.tensors import numels
from unisono.core.threads import SerialWorker
from unisono.core.tracing import SINK, profiler, record_collective, record_message
from unisono.core.transport import FastPath, Options, Tensors, Transport
from unisono.core.types import PointToPoint, ReduceOp, Timeout, Work
from unisono.core.work import Completion, Deferred, resolve_timeout, seconds_left
from unisono.diagnostics.hang_report import with_hang_report
from unisono.errors import AbortedError, ClosedError, CommError, CommTimeoutError, MismatchError, PeerLostError
from unisono.serialization import decode, encode
from unisono.wrappers.trace import observed, waits_of

__all__ = ["ANY_THREAD", "ON_TIMEOUT", "SUSPENDABLE", "Engine", "FailureRelay"]

ANY_THREAD = -1
"""Value of `owner` that permits calls from any thread."""

ON_TIMEOUT = "UNISONO_ON_TIMEOUT"
"""Environment variable: "debug" holds all ranks for a debugger when a call has timed out, before it fails."""

SUSPENDABLE = frozenset({"thread", "shm", "tcp", "sim"})
"""Backends whose deadlines stop while a debugger holds the ranks."""

# Shortcut for the fast path, which checks the phase in every call.
_OPEN = Phase.OPEN
_MESSAGES = frozenset({"send", "recv", "isend", "irecv", "sendrecv", "batch_isend_irecv", "probe", "iprobe"})
_NEVER: list[tuple[int, Agreed]] = []
"""Empty list of pending values, used with `check="off"`."""
_PATIENCE_S = 1.0
"""Seconds that a rank with a broken connection waits for the control plane to report the lost rank."""


class Engine:
    """Progress engine of one communicator. Collectives run one at a time, in call order.

    A blocking collective runs in the caller's thread: on the transport's fast path, if that suffices. An asynchronous
    collective runs in one helper thread, created on first use; a blocking collective called while that thread is busy
    is queued behind its work.

    Communicators and pending works hold references to the engine. When the last reference is dropped without
    `close`, `ending` stops the threads.

    Args:
        transport, control, options: The communicator's transport, control handle and options.
        hosts: Name of each rank's host.
        check: The communicator's `check` option.

    Attributes:
        transport, control, options: As passed, or as replaced by `wrap`.
        group: The communicator's group.
        activity: This rank's activity.
        slow_rank: Finder of the rank that holds up the other ranks.
        owner: The thread that uses the communicator; None before the first call.
        life: Phase, which determines what happens to the next call.
        broken: The first cause of the group's failure.
        checked: Whether ranks compare their collectives.
        uneven_batches: Whether a sampler gives ranks batches of unequal sizes, and no warning has been issued.
        fast_path: The transport's fast path, or `PlainCalls`; None without a fast path.
        selection: Chooses algorithms.
        tuner: Cost table for "auto".
        parent: The engine of the parent communicator, which must outlive this one.
        ending: Teardown that releases all resources.
    """

    def __init__(
        self, transport: Transport, control: ControlPlane, options: Options, hosts: Sequence[str], *, check: str
    ) -> None:
        self.transport: Transport = transport
        self.control: ControlPlane = control
        self.options = options
        self.group: Group = transport.group
        group = self.group
        self._here = {"rank": group.rank, "size": group.size, "group": group.text}
        self.activity: Activity = Activity(group)
        self.slow_rank: SlowRank = SlowRank(self.activity)
        self.owner: int | None = None
        self.life: Life = Life()
        self.uneven_batches = False
        self.broken: Cause | None = None
        # Whether a background comparison of collectives has failed, and whether the program has seen an error of the
        # group.
        self._differed = False
        self._raised = False
        self.agreements: Agreements = Agreements()
        self._waiting = self.agreements.waiting if check != "off" else _NEVER
        self._compared: dict[str, int] = {}
        self._calls = 0
        self._process = os.getpid()
        self.fast_path: FastPath | None = self._fast_path_of(transport)
        self.tuner: Tuner = Tuner(transport, control, options, hosts)
        self.selection: Selection = Selection(
            transport, options.chunk_bytes, deterministic=options.deterministic, machine=self.tuner.machine
        )
        self.checked: bool = check != "off"
        self._staging = BufferGuard if check == "full" else Staging
        self._streams: dict[torch.device, torch.Stream] = {}
        self._sink = SINK
        self._limit_s = options.timeout_s
        # Threads inside a collective, in which a signal handler must not start another one.
        self._inside: set[int] = set()
        self._helper = SerialWorker(f"unisono {group.name} rank {group.rank}")
        self._pending = 0
        self._lock = threading.Lock()
        self.parent: Engine | None = None
        self.ending: Teardown = Teardown(transport, control, self._helper, options.timeout_s)
        self._dropped = weakref.finalize(self, self.ending.drop)
        # Don't run it at process exit: the control plane's handle then closes communicators that are still open.
        self._dropped.atexit = False
        invalidate_after_fork(self)
        HOLD.add(self)

    def wrap(self, transport: Transport, control: ControlPlane) -> None:
        """Replace the transport and control plane, for example with a recording wrapper."""
        self.transport = transport
        self.control = self.tuner.control = control
        self.fast_path = self._fast_path_of(transport)

    def _fast_path_of(self, transport: Transport) -> FastPath | None:
        if self.options.deterministic:
            # The fast path sums in a different order than deterministic collectives do.
            return None
        plain = transport.plain()
        return transport.fast_path if plain is None else PlainCalls(transport, plain, self.activity)

    def measured(self, what: str, make: Callable[[], Any]) -> Any:
        """Return what `make` returns; see `ControlPlane.measured`."""
        return self.control.measured(self.group, what, make)

    # -- whether calls can be made -------------------------------------------------------------
    def enter(self, operation: str) -> None:
        """Raise unless this thread may use the communicator and the communicator still works."""
        here = get_ident()
        if self.owner != here and self.owner != ANY_THREAD:
            self.own(operation)
        if self.life.phase is not _OPEN:
            # Check in a loop, because the ranks may be held again before this thread has run.
            while self.life.phase is Phase.HELD:
                HOLD.wait()
            self.check(operation)

    @property
    def closed(self) -> bool:
        """Whether this rank has closed the communicator, or another communicator has replaced it."""
        return self.life.phase in (Phase.CLOSED, Phase.RETIRED)

    def suspend(self) -> bool:
        """Make the next call wait for `resume`; return False if it would raise instead."""
        return self.life.change(Event.HOLD)

    def resume(self) -> None:
        """Undo `suspend`."""
        self.life.change(Event.GO)

    def own(self, operation: str) -> None:
        """Raise unless this thread may use the communicator; the first thread to use it becomes the owner."""
        here = get_ident()
        if self.owner is None:
            self.owner = self.activity.owner = here
        if self.owner not in (here, ANY_THREAD):
            error = CommError(
                f"this communicator belongs to another thread than {threading.current_thread().name!r}; "
                "call release_thread() there first, or use dup() for a second communicator"
            )
            raise self.with_context(error, operation)

    def check(self, operation: str | None) -> None:
        """Raise if no more calls can be made; the error names this operation."""
        failure = self.failure(operation)
        if failure is not None:
            raise failure

    def check_open(self, operation: str) -> None:
        """Raise if the communicator is closed. A broken communicator passes."""
        if self.closed:
            self.check(operation)

    def failure(self, operation: str | None = None) -> CommError | None:
        """Return the error that further calls would raise, naming this operation; None while calls can be made."""
        self._raised = self._raised or self.broken is not None
        if self.closed:
            return self.with_context(ClosedError("the communicator is closed; create a new communicator"), operation)
        return None if self.broken is None else self.with_context(error_of(self.broken, self.group), operation)

    def invalidate_after_fork(self) -> None:
        """Mark the engine as broken in a forked child: the parent still uses the connections and shared memory."""
        whose = f"this communicator belongs to process {self._process}, of which this process is a fork"
        self.broken = Cause(
            "CommError", None, f"{whose}; create a new communicator here, or start processes with spawn or forkserver"
        )
        # Create a new lock, because nobody in the child would release one that another thread of the parent held.
        self.life = Life(self.life.phase)
        self.life.change(Event.FAIL)

    # -- the fast path: 1 us per call ----------------------------------------------------------
    def try_collective(
        self,
        what: Collective,
        output: Tensors,
        input: Tensors,
        op: object,
        root: int | None,
        algorithm: str | None,
        timeout: Timeout | None,
        /,
    ) -> bool:
        """Run a blocking collective on the transport's fast path; return False, with no effect, if not possible."""
        fast = self.fast_path
        here = get_ident()
        if fast is None or (self.owner != here and self.owner != ANY_THREAD):
            return False
        if self._pending or self._inside or self.life.phase is not _OPEN or profiler._is_profiler_enabled:
            return False
        if self._waiting:
            return False
        limit = self._limit_s if timeout is None else resolve_timeout(timeout)
        caller = _getframe(2)
        activity = self.activity
        while caller.f_code.co_filename.startswith(NOT_THE_USERS) and caller.f_back is not None:
            caller = caller.f_back
        detail = str(op or "") if root is None else f"root {root}"
        record = activity.enter(what.name, self._calls + 1, detail, (caller.f_code, caller.f_lasti))
        self._inside.add(here)
        try:
            status = fast.try_collective(what, output, input, op, root, algorithm, activity.since + limit)
            if status is Status.MISMATCH:
                fast.mismatch(self.make(what, output, input, op=op, root=root, algorithm=algorithm).fingerprint)
            if status is Status.OK:
                # Transports write without torch's functions, so bump the version here.
                if output is not None and (root is None or what.writes(self.group.rank, root)):
                    increment_version(output)  # type: ignore[arg-type]  # no fast path accepts other buffers
                activity.calls = self._calls = self._calls + 1
                activity.keep(record)
                if (sink := self._sink.get()) is not None:
                    record_collective(sink, activity, what, (output, input), op, root)
        except BaseException as error:
            # Report even an interrupt, because other ranks have seen part of the collective.
            raise_caused(self._report_fast(error, record), error)
        finally:
            self._inside.discard(here)
            activity.leave()
        return status is Status.OK

    def _report_fast(self, error: BaseException, record: Record) -> BaseException:
        """Return the error to raise for a call on the fast path: from `report_failure`, unless the call was refused."""
        if _refuses(error):
            return error
        self._calls += 1
        self.activity.note(*record[:4])
        return self.report_failure(error, record[0], self._calls)

    def try_message(self, name: str, tensor: Any, peer: Any, tag: int, timeout: Timeout | None, /) -> bool:
        """Send or receive ("send", "recv") on the fast path; return False, with no effect, if that doesn't suffice."""
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
            raise_caused(self.report_failure(error, name, activity.messages + 1), error)
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
        """Return the staging that makes a call's tensors one-dimensional and contiguous."""
        return self._staging(self.transport.host_staged, self._streams)

    def make(
        self,
        what: Collective,
        output: Tensors = None,
        input: Tensors = None,
        *,
        op: object = None,
        root: int | None = None,
        algorithm: str | None = None,
        timeout: Timeout | None = None,
        splits: Splits = (None, None),
        lengths: tuple[int, ...] = (),
        origin: tuple[int, str] | None = None,
        after: Call | None = None,
        scale: float | None = None,
    ) -> Call:
        """Return a `Call` with the caller's arguments; raise if this rank alone can tell that they are invalid.

        Args:
            what: The collective.
            output, input: The caller's tensors to write to and read from.
            op, root, algorithm, timeout: The caller's arguments.
            splits, lengths: See `make_call`.
            origin: In a backward pass, the number and line of the collective whose gradients this one moves.
            after: Previous half of a two-part collective; this half reuses its call site.
            scale: Factor for each contribution to a sum.
        """
        if after is None and (self.owner != get_ident() or self.life.phase is not _OPEN):
            self.enter(what.name)
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
        if scale is not None and self.checked:
            # Add the value only after all checks: a rejected collective must leave no value to compare.
            self.agreements.add(scale, "scale")
        if after is None:
            number = self._calls + 1
            place = callers_place()
        else:
            number = after.fingerprint.call + 1
            place = after.fingerprint.site
        fingerprint = _fingerprint(what, call, like, number, algorithm, place, origin)
        return call._replace(
            fingerprint=fingerprint,
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
        """Run a collective, with arguments as for `make`, and return when it is done; use the fast path if possible."""
        plain = not lengths and origin is None
        if not (plain and self.try_collective(what, output, input, op, root, algorithm, timeout)):
            call = self.make(
                what,
                output,
                input,
                op=op,
                root=root,
                algorithm=algorithm,
                timeout=timeout,
                lengths=lengths,
                origin=origin,
            )
            self.run(call)

    @property
    def is_inside(self) -> bool:
        """Whether this thread is already inside a collective, as can happen in a signal handler."""
        return get_ident() in self._inside

    def _called_inside(self, operation: str) -> CommError:
        outer = format_call(*self.activity.now[:4]) if self.activity.now else "another collective"
        return self.with_context(
            CommError(
                f"{operation} was called inside {outer}, as by a signal handler. Set a flag in the handler, and make "
                "the call after the outer call has returned; un.stop does so for a stop at the same step on all ranks"
            ),
            operation,
        )

    def run(self, call: Call, *, async_op: bool = False, then: Callable[[Call], Call] | None = None) -> Work | None:
        """Run a collective, and return None when it is done; or start it, and return its work.

        Args:
            call: Call created by `make`.
            async_op: Whether to return without waiting.
            then: Function that makes the second half of a two-part collective, given the first half and its results.
        """
        fingerprint = call.fingerprint
        if self.is_inside:
            raise self._called_inside(fingerprint.operation)
        if self._waiting and (agreed := self.agreements.take(fingerprint.call)) is not None:
            # Take the values here and not in `make`: a collective that is made and then rejected must not consume them.
            fingerprint = fingerprint._replace(call=fingerprint.call + 1)
            call = call._replace(agreed=agreed, fingerprint=fingerprint)
        self._calls = fingerprint.call if then is None else fingerprint.call + 1
        self.activity.note(fingerprint.operation, self._calls, fingerprint, fingerprint.site)
        transport, waiting = observed(self.transport, call, starts=async_op)
        with waiting:
            starts = async_op and call.steps is None and call.agreed is None and then is None and not self._pending
            if starts and transport.starts(call):
                work = self._start(call, transport)
                return waits_of(self.transport.returned(work), fingerprint.operation, self.group)
            with self._lock:
                queued = async_op or self._pending > 0
                if queued:
                    self._pending += 1
            if not queued:
                self._perform(call, transport, then)
                return None
            call.staging.follow((*call.inputs, *call.outputs))
            # Add one default timeout, because the hang report that names the missing ranks must finish first.
            done = _Queued((1 if then is None else 2) * call.timeout + self.options.timeout_s, self.activity)
            self._helper.run(partial(self._progress, call, transport, then, done))
            if not async_op:
                done.wait()
                return None
        return waits_of(self.transport.returned(done), fingerprint.operation, self.group)

    def flush_agreements(self, barrier: Collective, timeout: Timeout | None) -> None:
        """Compare the pending values now. Collective. A mismatch doesn't break the communicator: every rank raises."""
        limit = self._limit_s if timeout is None else resolve_timeout(timeout)
        mine = self.agreements.take(self._calls) or Fingerprint(self._calls, "agree")
        # The barrier detects ranks that call a different collective.
        self.block(barrier, timeout=limit)
        topic = f"agreements before call {self._calls}"
        try:
            if self.control.exchange_unless_equal(self.group, topic, mine.agreed, limit) is None:
                return
            values = self.control.exchange(self.group, f"{topic}, in full", mine.values(), limit)
        except BaseException as error:
            raise_caused(self.report_failure(error, "flush_agreements"), error)
        self._refuse_differences({rank: Fingerprint(*each) for rank, each in enumerate(values)})

    def settle(self) -> None:
        """Compare pending values before closing; raise a mismatch unless a collective has already raised it."""
        if not self.closed:
            self.transport.settle()
        if self._differed and not self._raised:
            self.check("close")
        self._close_agreements()

    def _close_agreements(self) -> None:
        """Compare the pending values with those of the first rank to close; no rank waits for another."""
        mine = self.agreements.take(self._calls + 1) if self.parent is None and self.failure() is None else None
        if mine is None:
            return
        own = encode((self.group.rank, mine.values()))
        rank, theirs = decode(self.control.compare_set(f"{self.group.name}/agreements", b"", own))
        try:
            self._refuse_differences({self.group.rank: mine, rank: Fingerprint(*theirs)})
        except MismatchError as error:
            raise_caused(self.report_failure(error, "close"), error)

    def require_same(self, what: str, value: bytes, wrong: Exception) -> None:
        """Raise an error, and break the communicator, if a rank that called earlier passed a different value.

        No rank waits for another, and not every rank has to call this. If two ranks differ, the second one to call
        fails.

        Args:
            what: Description of the value. Equal descriptions are compared in the order of calls.
            value: Any bytes.
            wrong: The error to raise.
        """
        if self.closed or self.group.size == 1:
            return
        number = self._compared[what] = self._compared.get(what, 0) + 1
        key = f"{self.group.name}/{what}/{number}"
        first = self.control.compare_set(key, b"", value)
        if self.control.add(f"{key}/ranks", 1) == self.group.size:
            self.control.delete(key)
            self.control.delete(f"{key}/ranks")
        if first != value:
            raise self.report_failure(wrong, "a comparison of samples")

    def _refuse_differences(self, prints: dict[int, Fingerprint]) -> None:
        difference = disagreement(prints)
        if difference:
            raise self.with_context(MismatchError(difference), "agree")

    def skip(self) -> None:
        """Increment the sequence number for a collective that no rank runs."""
        self._calls += 1

    def _perform(self, call: Call, transport: Transport, then: Callable[[Call], Call] | None = None) -> None:
        deadline = clock.now() + call.timeout
        with self._carrying_out(call):
            self._compare(call, transport, deadline)
            call.staging.begin()
            work = transport.run(call)
            work.wait(seconds_left(deadline))
            call.staging.end()
            failed = work.exception()
            if failed is not None:
                # With streams, a torch group's work completes only after its wait has returned, so check for a failure
                # here.
                raise failed
        if then is not None:
            with self._carrying_out(call, refusals=False):
                second = then(call)
            self._perform(second, transport)

    def _compare(self, call: Call, transport: Transport, deadline: float) -> None:
        """Return once the collective may write to memory: all ranks have compared it, and the pending values."""
        if call.agreed is not None:
            # Pass empty steps, so that every transport compares the values as a separate collective.
            transport.compare(Call("barrier", fingerprint=call.agreed, steps=_no_steps), deadline)
        transport.compare(call, deadline)

    def _start(self, call: Call, transport: Transport) -> Work:
        """Start a collective on a transport that makes progress by itself; the thread that waits completes it."""
        with self._carrying_out(call):
            self._compare(call, transport, clock.now() + call.timeout)
            call.staging.begin()
            work = transport.run(call)

        def complete(deadline: float) -> None:
            with self._carrying_out(call):
                work.wait(seconds_left(deadline))
                call.staging.end()

        # If the group has failed, a wait ends immediately, with the first cause.
        return Deferred(complete, call.timeout, lambda: work.is_completed() or self.broken is not None)

    @contextmanager
    def _carrying_out(self, call: Call, *, refusals: bool = True) -> Iterator[None]:
        """Mark this rank as inside the collective, and report a failure in this block to every rank.

        Without `refusals`, errors that reject a collective are not reported, because every rank raises them.
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
                error if refused else self.report_failure(error, fingerprint.operation, fingerprint.call), error
            )
        finally:
            self._inside.discard(here)
            activity.leave()

    def _progress(
        self, call: Call, transport: Transport, then: Callable[[Call], Call] | None, work: Completion
    ) -> None:
        """Run a queued collective in the helper thread."""
        error: BaseException | None = None
        self.activity.in_background = True
        begun_s = clock.now()
        try:
            # A collective that was started before `close` still completes, unless another group has replaced this one.
            if self.broken is not None or self.life.phase is Phase.RETIRED:
                self.check(call.fingerprint.operation)
            with torch.inference_mode(call.inference):
                self._perform(call, transport, then)
        except BaseException as raised:
            error = raised
        with self._lock:
            self._pending -= 1
        self.activity.in_background = False
        # From the program's point of view, only its waits count as time inside a collective.
        self.activity.outside_s += clock.now() - begun_s
        work.complete(error)

    # -- failures ------------------------------------------------------------------------------
    def on_failure(self, cause: Cause) -> None:
        """Break the group, and end every wait in it. No effect if already broken, or closed with nothing queued.

        Callable from any thread: the control plane's thread calls it for a cause reported elsewhere, a caller's thread
        for its own error or `abort`, and the helper thread for an error in an asynchronous collective.
        """
        unfinished = self._pending > 0 and self.life.phase is not Phase.RETIRED
        if HOLD.holds(self):
            # Release held ranks first, because they would not notice the failure.
            HOLD.go()
        if self.broken is None and (not self.closed or unfinished):
            # Set `broken` before the phase, because a call that finds the phase broken raises the cause. Two threads
            # may reach this line: both pass the group's first cause, and everything below is idempotent.
            self.broken = cause
            self.life.change(Event.FAIL)
            self.activity.broken = True
            self.transport.abort(error_of(cause, self.group))

    def report_later(self, error: BaseException, fingerprint: Fingerprint) -> None:
        """Break the group for a mismatch found while a collective was running; the next one, or `settle`, raises it."""
        if not self.closed:
            # Set this before the group breaks, because `settle` may be called at any time.
            self._differed = True
            # If the control plane is lost, its loss is already known as the first cause.
            with suppress(CommError):
                self._report(error, fingerprint.operation, fingerprint.call)

    def report_failure(self, error: BaseException, operation: str | None, call: int | None = None) -> BaseException:
        """Break the group for this error, and return the error to raise: the group's first cause.

        Args:
            error: Error raised by the operation, or by the program itself.
            operation: Name of the operation; None for the program.
            call: Number of the operation; the next one if None.
        """
        self._raised = True
        return self._report(error, operation, call)

    def _report(self, error: BaseException, operation: str | None, call: int | None) -> BaseException:
        where = operation or "the program"
        if not self.closed:
            self.activity.log_event("error", f"{type(error).__name__} in {where}: {text_of(error)}".partition("\n")[0])
        if self.broken is None:
            if isinstance(error, CommTimeoutError) and os.environ.get(ON_TIMEOUT) == "debug":
                self.hold(f"timed out in {where}: {text_of(error)}".partition("\n")[0])
            self.activity.fail(timed_out=isinstance(error, CommTimeoutError))
            error = with_hang_report(error, self.control, self.group)
        own = to_cause(error, self.group.rank, where)
        first = self.broken or self._first_cause(own, error)
        if not isinstance(error, CommError):
            return error
        return self.with_context(error if first == own else _first_error(error, first, self.group), operation, call)

    def _first_cause(self, own: Cause, error: BaseException) -> Cause:
        """Report this rank's cause, and return the group's first one."""
        anonymous = isinstance(error, PeerLostError) and error.peer is None
        known = self.control.first_cause(self.group, _PATIENCE_S if anonymous else 0.0)
        first = known or self.control.report_failure(self.group, own)
        self.on_failure(first)
        return first

    def with_context(self, error: CommError, operation: str | None, call: int | None = None) -> CommError:
        """Return the error with its context: rank, location, and call number (by default, the next one)."""
        if call is None and operation is not None:
            # Messages and collectives are numbered separately.
            call = 1 + (self.activity.messages if operation in _MESSAGES else self._calls)
        return error.locate(**self._here, operation=operation, call=call)

    def hold(self, why: str, show: Callable[[], None] | None = None) -> None:
        """Hold all ranks for a debugger, and return when it releases them; do nothing if deadlines cannot be suspended.

        Args:
            why: What happened on this rank.
            show: Function that opens a prompt here, if ranks are threads; None if the debugger has to attach.
        """
        if not self.can_hold:
            return
        rank = self.group.members[self.group.rank]
        self.control.hold(f"rank {rank} {why}")
        if show is not None and self.transport.in_process:
            show()
        else:
            reported = f"rank {rank} {why}. All ranks are held; attach with: unisono debug {os.getpid()}"
            sys.stderr.write(f"{reported}\n")
            sys.stderr.flush()
        HOLD.wait()

    @property
    def can_hold(self) -> bool:
        """Return whether this backend's deadlines can be suspended."""
        return sys.platform == "linux" and set(self.options.backend.split("+")) <= SUSPENDABLE

    # -- end -----------------------------------------------------------------------------------
    def close(self, patience: float) -> None:
        """Accept no more calls, finish those in flight, and leave; wait briefly for the other ranks to leave."""
        self.life.change(Event.CLOSE)
        self.activity.closed = True
        if self.broken is None:
            self.activity.log_event("end", "closed")
        self._dropped.detach()
        self.ending.close(0.0 if self.broken is not None else patience)

    def retire(self) -> None:
        """Accept no more calls, and abort those in flight, because another group replaces this one."""
        if self.closed:
            return
        self.life.change(Event.RETIRE)
        self.activity.closed = self.ending.over = True
        self._dropped.detach()
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
            self.agreements = whole.agreements
            self._waiting = self.agreements.waiting if self.checked else _NEVER
        whole.ending.adopt(self.ending)


class _Queued(Completion):
    """Work for a collective that runs in the helper thread. The program's waits count as time inside a collective."""

    def __init__(self, timeout_s: float, activity: Activity) -> None:
        super().__init__(timeout_s)
        self._activity = activity

    def wait(self, timeout: Timeout | None = None) -> None:
        begun_s = clock.now()
        try:
            super().wait(timeout)
        finally:
            self._activity.outside_s -= clock.now() - begun_s


class FailureRelay:
    """Relays failures from the control plane to a communicator, without keeping the communicator alive.

    A failure that arrives before the communicator is created is stored until then.
    """

    def __init__(self) -> None:
        self._causes: list[Cause] = []
        self._engine: Callable[[], Engine | None] = lambda: None

    def on_failure(self, cause: Cause) -> None:
        """Pass a cause on, from any thread."""
        self._causes.append(cause)
        engine = self._engine()
        if engine is not None:
            engine.on_failure(cause)

    def report(self, error: BaseException, fingerprint: Fingerprint) -> None:
        """Pass on a mismatch found while a collective was running."""
        engine = self._engine()
        if engine is not None:
            engine.report_later(error, fingerprint)

    def connect(self, engine: Engine) -> None:
        """Pass on all causes, including earlier ones."""
        self._engine = weakref.ref(engine)
        for cause in self._causes:
            engine.on_failure(cause)


def _refuses(error: BaseException) -> bool:
    """Return whether an error rejects a collective because of its arguments, before anything is done."""
    return isinstance(error, TypeError | ValueError) and not isinstance(error, CommError)


def _first_error(error: CommError, first: Cause, group: Group) -> CommError:
    """Return the error for the group's first cause, on a rank whose own error is a consequence of it."""
    if isinstance(error, CommTimeoutError) and type(error).__name__ == first.kind:
        # Use the hang report of the first error: by the time of a later report, ranks may have continued.
        if "\n" in first.message:
            error.message = error.message.partition("\n")[0] + "\n" + first.message.partition("\n")[2]
        return error
    # Prefer the first report of a lost rank, which has the original exception; later ones only say "left".
    if isinstance(error, AbortedError) or (type(error).__name__ == first.kind and not isinstance(error, PeerLostError)):
        return error
    reported = error_of(first, group)
    reported.__cause__ = error
    return reported


def _no_steps(transport: PointToPoint, call: Call, deadline: float) -> None:
    pass


def _fingerprint(
    what: Collective,
    call: Call,
    like: torch.Tensor | None,
    number: int,
    algorithm: str,
    place: Place,
    origin: tuple[int, str] | None = None,
) -> Fingerprint:
    """Return a collective's fingerprint; `like` is a tensor of its dtype, device and shape."""
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
        call=number,
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
        site=place if origin is None else f"{site_text(place)}, backward of {origin[1]}",
    )
