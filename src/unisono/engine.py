"""Carries out plans one after another, in the order of calls, and keeps the first cause of a failure."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import torch

from unisono.control import Cause, Control, error_of
from unisono.deferred import Deferred
from unisono.errors import AbortedError, ClosedError, CommError, CommTimeoutError, MismatchError, PeerLostError
from unisono.execute import Spare, execute
from unisono.fingerprint import Fingerprint
from unisono.plan import Plan
from unisono.reduction import combine
from unisono.schedules import SCHEDULES, chunks_of
from unisono.select import NATIVE, choose
from unisono.site import call_site
from unisono.transport import Options, Transport
from unisono.types import ReduceOp, Work
from unisono.work import Completion
from unisono.wrappers.trace import is_traced, traced

__all__ = ["Engine"]

_PATIENCE_S = 1.0
"""How long a broken connection waits to be told, over the control plane, who was lost."""


@dataclass(frozen=True, slots=True)
class _Job:
    plan: Plan
    transport: Transport
    algorithm: str
    fingerprint: Fingerprint
    timeout: float
    inference: bool


class Engine:
    """The moving part of one communicator. Collectives run one at a time, in the order of their calls.

    A blocking call drives itself. An asynchronous one is driven by one thread, made when first needed;
    a blocking call that comes while that thread is busy takes its turn there.
    """

    def __init__(self, transport: Transport, control: Control, options: Options) -> None:
        self.transport, self.control, self.options = transport, control, options
        self.group = transport.group
        self.closed = False
        self._quick = transport.quick
        self._spare = Spare()
        self._broken: Cause | None = None
        self._calls = 0
        self._jobs: queue.SimpleQueue[tuple[_Job, Completion] | None] = queue.SimpleQueue()
        self._pending = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    # -- state ---------------------------------------------------------------------------------
    def check(self, operation: str) -> None:
        """Raise if nothing can be called any more."""
        if self.closed:
            raise self._located(ClosedError("the communicator is closed; make a new one"), operation)
        if self._broken is not None:
            raise self._located(error_of(self._broken, self.group), operation)

    def on_failure(self, cause: Cause) -> None:
        """What the control plane calls, from its own thread, when the group has failed."""
        if self._broken is None and not self.closed:
            self._broken = cause
            self.transport.abort(error_of(cause, self.group))

    def failed(self, error: BaseException, operation: str, call: int | None = None) -> BaseException:
        """Break the group for this error, and return the error to raise: the group's first cause."""
        cause = _cause_of(error, self.group.rank, operation)
        anonymous = isinstance(error, PeerLostError) and error.peer is None
        known = self._broken or self.control.cause(self.group, _PATIENCE_S if anonymous else 0.0)
        first = known or self.control.fail(self.group, cause)
        self.on_failure(first)
        if not isinstance(error, CommError):
            return error
        # Of a lost rank, whoever was first told more: what it failed by, where others see only that it has left.
        same = type(error).__name__ == first.kind and not isinstance(error, PeerLostError)
        as_good = isinstance(error, AbortedError) or same
        if first != cause and not as_good:
            told = error_of(first, self.group)
            told.__cause__ = error
            error = told
        return self._located(error, operation, call)

    def _located(self, error: CommError, operation: str, call: int | None = None) -> CommError:
        return error.locate(rank=self.group.rank, size=self.group.size, operation=operation, call=call)

    # -- collectives ---------------------------------------------------------------------------
    def quickly(self, tensor: torch.Tensor | None, op: str, timeout: float | None) -> bool:
        """All-reduce a tensor, or pass a barrier if None, by the transport's shorter way; whether it was taken."""
        quick = self._quick
        if quick is None or self._pending or self._broken is not None or self.closed or is_traced():
            return False
        limit = self.options.timeout_s if timeout is None else timeout
        try:
            done = quick.barrier(limit) if tensor is None else quick.all_reduce(tensor, op, limit)
        except CommError as error:
            self._calls += 1
            raise self.failed(error, "barrier" if tensor is None else "all_reduce", self._calls) from error
        self._calls += done
        return done

    def run(self, plan: Plan, name: str, algorithm: str | None, async_op: bool, timeout: float | None) -> Work | None:
        """Carry out a plan now, or soon; None when it is done, or the work under way."""
        job = self._prepare(plan, name, algorithm, timeout)
        if async_op and job.algorithm == NATIVE and job.transport.overlaps and not self._pending:
            return self._start(job)
        with self._lock:
            queued = async_op or self._pending > 0
            if queued:
                self._pending += 1
        if not queued:
            self._perform(job)
            return None
        work = Completion(job.timeout)
        self._start_thread()
        self._jobs.put((job, work))
        if async_op:
            return work
        work.wait(job.timeout + self.options.timeout_s)
        return None

    def _prepare(self, plan: Plan, name: str, algorithm: str | None, timeout: float | None) -> _Job:
        call, example = plan.call, plan.example
        chosen = choose(self.transport, call, plan.nbytes, algorithm)
        self._calls += 1
        fingerprint = Fingerprint(
            call=self._calls,
            operation=name,
            op=None if call.asked is None else call.asked.value,
            root=call.root,
            dtype=None if example is None else str(example.dtype).removeprefix("torch."),
            counts=plan.counts,
            device=None if example is None else example.device.type,
            algorithm=chosen,
            sends=plan.sends,
            receives=plan.receives,
            shape=None if example is None else tuple(example.shape),
            site=call_site(),
        )
        limit = self.options.timeout_s if timeout is None else timeout
        return _Job(plan, traced(self.transport), chosen, fingerprint, limit, torch.is_inference_mode_enabled())

    def _perform(self, job: _Job) -> None:
        deadline = time.monotonic() + job.timeout
        self._see_through(job, self._begin(job), deadline)

    def _start(self, job: _Job) -> Work:
        """Let the transport go on by itself; the rest is done by whoever waits."""
        work = self._begin(job)
        assert work is not None
        return Deferred(lambda deadline: self._see_through(job, work, deadline), job.timeout, work.is_completed)

    def _begin(self, job: _Job) -> Work | None:
        """All that comes before the first wait for data; the transport's work if it carries the call."""
        with self._told_of(job), torch.no_grad():
            job.transport.begin(job.fingerprint, job.timeout)
            for action in job.plan.staging.before:
                action()
            return job.transport.collective(job.plan.call) if job.algorithm == NATIVE else None

    def _see_through(self, job: _Job, work: Work | None, deadline: float) -> None:
        with self._told_of(job), torch.no_grad():
            left = max(0.0, deadline - time.monotonic())
            if work is not None:
                work.wait(left)
            else:
                self._follow(job, left)
            for action in job.plan.staging.after:
                action()

    @contextmanager
    def _told_of(self, job: _Job) -> Iterator[None]:
        """Every rank learns of what fails in here."""
        try:
            yield
        except BaseException as error:
            told = self.failed(error, job.fingerprint.operation, job.fingerprint.call)
            if told is error:
                raise
            raise told from error

    def _follow(self, job: _Job, timeout: float) -> None:
        plan, call, size = job.plan, job.plan.call, self.group.size
        schedule = SCHEDULES[call.name][job.algorithm]
        root = call.root or 0
        for action in plan.placing:
            action()
        execute(
            job.transport,
            schedule.steps((self.group.rank - root) % size, size),
            plan.layout(chunks_of(schedule, call.name, size)),
            partial(combine, call.op or ReduceOp.SUM),
            segment_bytes=self.options.chunk_bytes,
            timeout=timeout,
            root=root,
            spare=self._spare,
        )
        for action in plan.collecting:
            action()

    # -- the progress thread -------------------------------------------------------------------
    def _start_thread(self) -> None:
        if self._thread is None:
            name = f"unisono {self.group.name} rank {self.group.rank}"
            self._thread = threading.Thread(target=self._progress, name=name, daemon=True)
            self._thread.start()

    def _progress(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, work = item
            error: BaseException | None = None
            try:
                self.check(job.fingerprint.operation)
                with torch.inference_mode(job.inference):
                    self._perform(job)
            except BaseException as raised:
                error = raised
            with self._lock:
                self._pending -= 1
            work.complete(error)

    def close(self, patience: float) -> None:
        """Take no more calls, finish what was started, and leave; waits a little for the others to leave too."""
        self.closed = True
        if self._thread is not None:
            self._jobs.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join(self.options.timeout_s)
        try:
            if self._broken is None and self.group.size > 1:
                self._part(patience)
            self.control.leave(self.group)
        except CommError:
            # The control plane went first; there is nobody left to tell.
            pass
        self.transport.close()

    def _part(self, patience: float) -> None:
        """Wait for the last one to leave, so that its last message is not cut off; nobody is blamed."""
        name = self.group.name
        if self.control.add(f"{name}/left", 1) == self.group.size:
            self.control.set(f"{name}/all left", b"")
        with suppress(CommTimeoutError):
            self.control.get(f"{name}/all left", patience)


def _cause_of(error: BaseException, rank: int, operation: str) -> Cause:
    """The error as the other ranks are told of it."""
    if isinstance(error, MismatchError):
        return Cause("MismatchError", error.peer, error.message)
    if isinstance(error, CommError):
        about = error.peer if error.peer is not None else rank
        return Cause(type(error).__name__, about, f"rank {rank} gave up in {operation}: {error.message}")
    return Cause("PeerLostError", rank, f"rank {rank} failed in {operation}: {type(error).__name__}: {error}")
