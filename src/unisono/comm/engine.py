"""Engine that executes plans one at a time, in the order of calls, and keeps the first cause of a failure."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import get_ident

import torch

from unisono.collectives.algorithm import run_algorithm
from unisono.collectives.arguments import Splits
from unisono.collectives.executor import ScratchPool
from unisono.collectives.plan import Plan
from unisono.collectives.selection import NATIVE
from unisono.comm.call_plans import CallPlans
from unisono.comm.fast_path import FastPathCalls
from unisono.comm.request import CollectiveRequest, make_request
from unisono.comm.state import refuses
from unisono.comm.teardown import Teardown
from unisono.comm.tuner import Tuner
from unisono.core.collective import Collective
from unisono.core.control import ControlPlane
from unisono.core.failure import raise_caused
from unisono.core.fast_path import Tensors
from unisono.core.flight_recorder import CallRecord, format_call
from unisono.core.lazy_work import Deferred
from unisono.core.threads import SerialWorker
from unisono.core.tracing import SINK, ObservedWork, profiler, sink_here, span
from unisono.core.transport import Options, Transport
from unisono.core.types import Message, Timeout, Work
from unisono.core.work import Completion, resolve_timeout
from unisono.errors import ClosedError, CommError

__all__ = ["Engine", "Follow"]

Follow = Callable[[], Plan]
"""Makes the plan of a call that depends on what the call before it has received."""


class Engine(CallPlans, FastPathCalls):
    """Progress engine of one communicator. Collectives run one at a time, in the order of their calls.

    A blocking call runs in the caller's thread. An asynchronous call runs in one helper thread, created on first use;
    a blocking call made while that thread is busy is queued there.

    Communicators and pending works hold references to the engine. When the last reference is dropped without
    `close`, `ending` ends the threads.

    Args:
        transport, control, options, full_check: As for `CallPlans`.
        hosts: Name of each rank's host.

    Attributes:
        parent: The engine of the parent communicator, which must outlive this one.
        vouched: With `check="full"`, the number of sends and of receives from one rank to another with a tag.
    """

    def __init__(
        self,
        transport: Transport,
        control: ControlPlane,
        options: Options,
        hosts: Sequence[str],
        *,
        full_check: bool = False,
    ) -> None:
        super().__init__(transport, control, options, full_check=full_check)
        self.fast_path = None if options.deterministic else transport.fast_path  # it sums in an order of its own
        self.tuner = Tuner(transport, control, options, hosts)
        self._sink, self._limit_s = SINK, options.timeout_s
        self._rank, self._inside = self.group.rank, set()
        self._spare = ScratchPool()
        self._helper = SerialWorker(f"unisono {self.group.name} rank {self.group.rank}")
        self._pending, self._retired = 0, False
        self._lock = threading.Lock()
        self.parent: Engine | None = None
        self.vouched: Counter[tuple[type[Message], int, int, int]] = Counter()
        self.ending = Teardown(transport, control, self._helper, options.timeout_s)
        self._dropped = weakref.finalize(self, self.ending.drop)
        # What is open at the end of the process is closed then by its control plane's handle.
        self._dropped.atexit = False

    # -- collectives ---------------------------------------------------------------------------
    def general_collective(
        self,
        what: Collective,
        output: Tensors,
        input: Tensors,
        op: object,
        root: int | None,
        algorithm: str | None,
        async_op: bool,
        timeout: Timeout | None,
        splits: Splits = (None, None),
        lengths: tuple[int, ...] = (),
        follow: Follow | None = None,
        origin: tuple[int, str] | None = None,
    ) -> Work | None:
        self.enter(what.name)
        plan = self.plan(what, output, input, op, root, splits, lengths, origin=origin)
        if sink_here() is None and not profiler._is_profiler_enabled:
            return self.run(plan, algorithm, async_op, timeout, follow)
        like = plan.like
        size = "" if like is None else f"{str(like.dtype).removeprefix('torch.')}{list(like.shape)}"
        with span("wait", what.name, self.group, 0 if like is None else like.nbytes, size, starts=async_op):
            work = self.run(plan, algorithm, async_op, timeout, follow)
        return None if work is None else ObservedWork(work, what.name, self.group)

    def run(
        self,
        plan: Plan,
        algorithm: str | None,
        async_op: bool,
        timeout: Timeout | None,
        follow: Follow | None = None,
    ) -> Work | None:
        """Execute a plan now, or soon; return None when it is done, or else the work in flight.

        With `follow`, a second plan is made then, and executed by `algorithm` before any other call.
        """
        job = self._prepare(plan, algorithm if follow is None else None, timeout)
        if follow is not None:
            job = self._followed(job, follow, algorithm)
        elif async_op and job.algorithm == NATIVE and job.transport.overlaps and not self._pending:
            return self._start(job)
        with self._lock:
            queued = async_op or self._pending > 0
            if queued:
                self._pending += 1
        if not queued:
            self._perform(job)
            return None
        plan.ordered()
        # Add one default timeout: the hang report that names the missing ranks must finish first.
        work = Completion((1 if follow is None else 2) * job.timeout + self.options.timeout_s)
        self._helper.run(partial(self._progress, job, work))
        if async_op:
            return work
        work.wait()
        return None

    def _prepare(self, plan: Plan, algorithm: str | None, timeout: Timeout | None) -> CollectiveRequest:
        limit = resolve_timeout(timeout, self.options.timeout_s)
        if get_ident() in self._inside:
            outer = format_call(self.activity.now) if self.activity.now else "another collective"
            raise self.with_context(
                CommError(
                    f"{plan.collective.name} was called inside {outer}, as by a signal handler. Set a flag in the "
                    "handler, and make the call after the outer call has returned"
                ),
                plan.collective.name,
            )
        # What is refused has no number.
        job = self._request(plan, self._calls + 1, algorithm, limit)
        self._calls += 1
        self.activity.note(job.noted)
        return job

    def _request(
        self, plan: Plan, number: int, algorithm: str | None, limit: float, site: str | None = None
    ) -> CollectiveRequest:
        how = algorithm, limit, self.options.deterministic, self.tuner.machine
        return make_request(plan, self.transport, number, *how, site=site)

    def _followed(self, job: CollectiveRequest, follow: Follow, algorithm: str | None) -> CollectiveRequest:
        """Return the request, followed by that of another plan, whose number is taken now."""
        self.skip()
        number, site = self._calls, job.fingerprint.site
        self.activity.note((job.noted[0], number, *job.noted[2:]))

        def second() -> CollectiveRequest:
            return self._request(follow(), number, algorithm, job.timeout, site)

        return replace(job, follow=second)

    def skip(self) -> None:
        """Count a call that is not made now, on any rank."""
        self._calls += 1

    def _perform(self, job: CollectiveRequest) -> None:
        deadline = time.monotonic() + job.timeout
        self._complete(job, self._begin(job), deadline)
        if job.follow is not None:
            with self._report_failures(job.noted, refusals=False), torch.no_grad():
                second = job.follow()
            self._perform(second)

    def _start(self, job: CollectiveRequest) -> Work:
        """Start the call in the transport, which progresses by itself; the waiting thread does the rest."""
        work = self._begin(job)
        assert work is not None
        return Deferred(lambda deadline: self._complete(job, work, deadline), job.timeout, self._ready(work))

    def _ready(self, work: Work) -> Callable[[], bool]:
        """Return a test of whether a wait would end immediately: with the first cause, if the group has failed."""
        return lambda: work.is_completed() or self._broken is not None

    def _begin(self, job: CollectiveRequest) -> Work | None:
        """Do everything before the first wait for data; return the transport's work if it supports the call."""
        with self._report_failures(job.noted), torch.no_grad(), job.plan.staging.order.entered():
            job.transport.begin(job.fingerprint, job.timeout)
            job.plan.staging.begin()
            return job.transport.collective(job.plan.call) if job.algorithm == NATIVE else None

    def _complete(self, job: CollectiveRequest, work: Work | None, deadline: float) -> None:
        with self._report_failures(job.noted), torch.no_grad(), job.plan.staging.order.entered():
            left = max(0.0, deadline - time.monotonic())
            if work is not None:
                work.wait(left)
            else:
                run_algorithm(
                    job.transport,
                    job.plan.call,
                    job.algorithm,
                    segment_bytes=self.options.chunk_bytes,
                    timeout=left,
                    spare=self._spare,
                )
            job.transport.end(job.fingerprint, job.plan.call, max(1.0, deadline - time.monotonic()))
            job.plan.staging.end()

    @contextmanager
    def _report_failures(self, noted: CallRecord, *, refusals: bool = True) -> Iterator[None]:
        """Report failures in this block to every rank, and show this rank as being in the call.

        Without `refusals`, errors that refuse a call are left out, because every rank raises them.
        """
        here = get_ident()
        self._inside.add(here)
        self.activity.enter(noted)
        try:
            yield
        except BaseException as error:
            refused = not refusals and refuses(error)
            raise_caused(error if refused else self.report_failure(error, noted[0], noted[1]), error)
        finally:
            self._inside.discard(here)
            self.activity.leave()

    # -- the progress thread -------------------------------------------------------------------
    def _progress(self, job: CollectiveRequest, work: Completion) -> None:
        error: BaseException | None = None
        self.activity.in_background = True
        try:
            # A call started before the end still completes, unless another group has replaced this one.
            if self._broken is not None or self._retired:
                self.check(job.fingerprint.operation)
            with torch.inference_mode(job.inference):
                self._perform(job)
        except BaseException as raised:
            error = raised
        with self._lock:
            self._pending -= 1
        self.activity.in_background = False
        work.complete(error)

    @property
    def unfinished(self) -> bool:
        return self._pending > 0 and not self._retired

    # -- end -----------------------------------------------------------------------------------
    def close(self, patience: float) -> None:
        """Accept no more calls, finish those started, and leave; wait briefly for the other ranks to leave too."""
        self.closed = self.activity.closed = True
        if self._broken is None:
            self.activity.log_event("end", "closed")
        self._dropped.detach()
        self.ending.close(0.0 if self._broken is not None else patience)

    def retire(self) -> None:
        """Accept no more calls, and abort those in flight, because another group replaces this one."""
        if self.closed:
            return
        self.closed = self.activity.closed = self.ending.over = self._retired = True
        self._dropped.detach()
        self.transport.abort(ClosedError("the communicator was rebuilt; use the new communicator"))
        self._helper.end()
        self.transport.close()

    def replace(self, other: Engine) -> None:
        """Replace a retired engine; its subgroups live as long as this one."""
        if other.parent is not None:
            self.set_parent(other.parent)
        other.parent = self
        self.ending.inherit(other.ending)

    def set_parent(self, whole: Engine) -> None:
        """Become a subgroup: end no later than the parent, and keep the parent alive until then."""
        self.parent = whole
        whole.ending.adopt(self.ending)
