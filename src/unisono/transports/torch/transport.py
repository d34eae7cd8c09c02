"""Transport over torch.distributed: gloo, nccl and other backends, without torch's global groups."""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from unisono.control.encryption import refuse_unencrypted
from unisono.control.torch_store import ControlStore
from unisono.core import clock
from unisono.core.call import Call
from unisono.core.collective import FAMILIES
from unisono.core.control import ControlPlane
from unisono.core.failure import connection_error
from unisono.core.forks import invalidate_after_fork
from unisono.core.group import Group
from unisono.core.staging import ACCELERATORS
from unisono.core.threads import DaemonThreadPool
from unisono.core.transport import Capabilities, Mailbox, Options, Transport
from unisono.core.types import Message, PointToPoint, Recv, Timeout, Work
from unisono.core.work import Completion, resolve_timeout, timeout_error
from unisono.errors import ClosedError, CommError
from unisono.transports.tcp.collectives import connected
from unisono.transports.tcp.mailbox import TcpMailbox
from unisono.transports.tcp.messages import TcpMessages
from unisono.transports.torch.collectives import ON_CPU, ON_GPU, START
from unisono.transports.torch.gloo_sockets import Sockets
from unisono.transports.torch.process_groups import backend_of

__all__ = ["TRANSPORT", "TorchTransport", "translated"]

_SLICE_S = 0.1
_LOOK_EVERY_S = 0.001
_GATHERED_BYTES = 4 << 20
"""Size from which gloo's all_gather is slower than our algorithms."""
_LAUNCH_S = 1.0
"""Seconds that an abort waits for a launch. A launch in nccl takes microseconds, unless it waits for other ranks."""

_threads = DaemonThreadPool("unisono torch")


class TorchTransport(Transport):
    """Transport over a torch process group's backend, without torch's default group or its group registry.

    Collectives are torch's own. With gloo, all messages, even those of algorithms, use unisono's own TCP sockets. This
    is because a wait in gloo can be neither interrupted nor polled, and gloo aborts the process if a message does not
    fit its receive buffer. With nccl, messages also use nccl, and waits are stream-ordered: see `_StreamWork`. Ranks
    compare their calls while nccl runs them, and mismatched calls end in an abort.
    """

    native: frozenset[str] = frozenset(START)
    overlaps = True
    latency_s: float = 150e-6
    second_per_byte: float = 1e-9

    def __init__(
        self,
        group: Group,
        backend: Any,
        control: ControlPlane,
        options: Options,
        *,
        sockets: Sockets | None = None,
        owned: bool = True,
    ) -> None:
        self.group = group
        self._backend = backend
        self._control = control
        self._options = options
        self._owned = owned
        self._sockets = sockets or Sockets()
        # `Work` objects in flight, in the order in which they were started, which is also the order in which NCCL
        # completes them.
        self._flying: deque[_BackendWork] = deque()
        self._lock = threading.Lock()
        declared = self.declared(options.backend)
        self.devices: frozenset[str] = declared.devices
        self.host_staged: frozenset[str] = declared.host_staged
        self.native = declared.native
        self._cuda = "cpu" not in self.devices
        # If ranks compare a call while it runs, a difference requires an abort. But a group that the caller owns must
        # not be aborted, and gloo aborts the process if calls differ. For groups that the caller owns, and on gloo,
        # ranks therefore compare before the call.
        self.compares_later: bool = self._cuda and owned
        self._device = torch.device(options.device).index if self._cuda else None
        self.tags: bool = not self._cuda
        self.any_source: bool = not self._cuda
        self._broken: BaseException | None = None
        self._store: ControlStore | None = None
        self._messages: TcpMessages | None = None
        if not self._cuda:
            self._messages = TcpMessages(group.rank, connected(group, control, options, "messages"))
        invalidate_after_fork(self)

    def invalidate_after_fork(self) -> None:
        """Leak torch's backend in a forked child: its destructor would wait for threads that only the parent has."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._backend))

    @classmethod
    def declared(cls, backend: str) -> Capabilities:
        if backend in ("gloo", "mpi"):
            # Gloo's reduce_scatter reduces the whole message on every rank, so our algorithms are faster for all but
            # the shortest messages.
            return Capabilities(ACCELERATORS | {"cpu"}, ACCELERATORS, cls.native - {"reduce_scatter"})
        return Capabilities(frozenset({"cuda"}), frozenset(), cls.native)

    @classmethod
    def connect(cls, group: Group, control: ControlPlane, options: Options) -> TorchTransport:
        refuse_unencrypted(options.backend)
        # Join the group without a failure callback: at first, the membership serves only to exchange values. The
        # communicator joins again, with a callback.
        control.join(group)
        made = cls._made(group, control, options, lazy=False)
        made._sockets.look()
        return made

    @classmethod
    def _made(cls, group: Group, control: ControlPlane, options: Options, *, lazy: bool) -> TorchTransport:
        store = ControlStore(control, f"torch/{group.name}", group=group)
        sockets = Sockets()
        try:
            backend = backend_of(group, control, store, options, sockets, lazy=lazy)
        except CommError:
            raise
        except RuntimeError as error:
            raise translated(error, []) from error
        made = cls(group, backend, control, options, sockets=sockets)
        # Keep the store alive: the backend references only its C++ part, which fails without the Python part.
        made._store = store
        return made

    def split(self, group: Group) -> TorchTransport:
        return self._made(group, self._control, self._options, lazy=True)

    def mailbox(self, group: Group) -> Mailbox:
        # Use separate connections to keep the mailbox's messages, which no caller waits for, apart from other messages.
        return TcpMailbox(group, self._control, self._options.address, self._options.timeout_s)

    def reconfigure(self, group: Group) -> TorchTransport:
        return self.connect(group, self._control, self._options)

    # -- messages ------------------------------------------------------------------------------
    def post(self, batch: Sequence[Message]) -> Work:
        if self._messages is not None:
            return self._messages.post(batch, self._options.timeout_s)
        if self._broken is not None:
            return Completion.ended(self._broken)
        if not batch:
            return Completion.ended()
        # Coalesce the batch into one launch. Even after an error, coalescing must end, or it would swallow the thread's
        # next messages.
        self._backend._start_coalescing()
        try:
            for message in batch:
                move = self._backend.recv if isinstance(message, Recv) else self._backend.send
                # Send bytes, because nccl supports few dtypes.
                move([message.tensor.view(torch.uint8)], message.peer, 0)
            work = self._backend._end_coalescing()
        except RuntimeError as error:
            with suppress(RuntimeError):
                self._backend._end_coalescing()
            raise translated(error, batch) from error
        return self._flown(work)

    def iprobe(self, peer: int, tag: int) -> bool:
        return super().iprobe(peer, tag) if self._messages is None else self._messages.holds(peer, tag)

    # -- native collectives --------------------------------------------------------------------
    def plain(self) -> Transport:
        return self

    def supports(self, call: Call) -> bool:
        if call.name not in self.native or call.lengths:
            return False
        family = FAMILIES[call.name]
        if family.reduces:
            if call.name == "reduce_scatter" and len({t.numel() for t in call.inputs}) != 1:
                return False
            return (call.inputs[0].dtype, call.op) in (ON_GPU if self._cuda else ON_CPU)
        if call.name == "all_gather":
            # Gloo gathers into internal memory and copies from there, so long messages take up to twice as long as with
            # our algorithms.
            short = self._cuda or sum(t.nbytes for t in call.outputs) < _GATHERED_BYTES
            return short and len({t.numel() for t in call.outputs}) == 1
        return True

    def run(self, call: Call, over: PointToPoint | None = None) -> Work:
        if call.steps is not None:
            return super().run(call, over)
        # Hold the lock until the work is in `_flying`, so that an abort from another thread finds it.
        with self._lock:
            if self._broken is not None:
                raise self._broken
            # Skip calls with only empty tensors, but not a barrier, which has no tensors.
            moves = max(map(torch.Tensor.numel, (*call.inputs, *call.outputs)), default=1)
            try:
                work = START[call.name](self._backend, call, self._device) if moves else None
            except RuntimeError as error:
                raise self._broken or translated(error, []) from error
            if self._broken is not None:
                # An abort has interrupted the launch.
                raise self._broken
            return self._flown(work)

    def _flown(self, work: Any) -> Work:
        if self._cuda:
            flown: _BackendWork = _StreamWork(work, self._options.timeout_s)
        else:
            # If a rank is lost before gloo has connected to it, there is no socket to shut down, so the wait itself
            # must check for an abort.
            flown = _PolledWork(work, self._options.timeout_s, lambda: self._broken)
        if self._owned:
            while self._flying and self._flying[0].is_finished():
                self._flying.popleft()
            self._flying.append(flown)
        return flown

    # -- end -----------------------------------------------------------------------------------
    def leave(self) -> None:
        if self._messages is not None:
            self._messages.leave()

    def close(self) -> None:
        if self._cuda:
            self._land()
        self._end(ClosedError("the communicator is closed"), lambda: False)
        if self._messages is not None:
            self._messages.close()

    def abort(self, cause: BaseException) -> None:
        # Shutting down gloo's sockets ends its waits on this rank and on its peers.
        self._end(cause, self._sockets.shut)

    def _land(self) -> None:
        """Wait for nccl to move the data that the caller's streams may still need; end on failure or timeout."""
        deadline = clock.now() + self._options.timeout_s
        # Iterate over a copy, here and in `_end`, because a launch in another thread may still append its work.
        while not all(work.is_finished() for work in list(self._flying)):
            if self._broken is not None or clock.now() > deadline:
                return
            time.sleep(_LOOK_EVERY_S)

    def _end(self, cause: BaseException, shut: Callable[[], bool]) -> None:
        """Detach the backend from this transport, and release it as soon as possible.

        A gloo backend must be kept alive while it waits: releasing it would block until its wait ends.
        """
        if self._messages is not None and self._broken is None:
            self._messages.abort(cause)
        # A launch may hold the lock forever: nccl connects ranks in a launch, and waits for ranks that make a different
        # call or are lost.
        launching = not self._lock.acquire(timeout=_LAUNCH_S)
        try:
            first = self._broken is None
            self._broken = self._broken or cause
            stuck = [known for known in list(self._flying) if not known.is_finished()]
            for known in stuck if self._cuda else ():
                # Fail the work, because the stream will not produce its results any more.
                known.fail(cause)
            # Drop the references to work in flight. A caller that waits for a `Work` object has its own reference to
            # it.
            self._flying = deque()
            backend = self._backend
            if not self._owned:
                return
            self._backend = _DetachedGroup(cause)
        finally:
            if not launching:
                self._lock.release()
        if self._cuda and first:
            # `abort` ends launches and kernels that wait for a lost rank. `shutdown` is needed because a group that is
            # only dropped leaks, and torch warns about it. On a failed device, `abort` and `shutdown` both raise an
            # error.
            with suppress(RuntimeError):
                (backend.abort if stuck or launching else backend.shutdown)()
        elif not self._cuda and (shut() or stuck):
            finished = [work.is_completed for known in stuck if (work := known.work) is not None]
            _threads.run(partial(self._sockets.abandon, backend, finished))


class _DetachedGroup:
    """Placeholder for a detached backend: every access raises the error that caused the detachment."""

    def __init__(self, cause: BaseException) -> None:
        self._cause = cause

    def __getattr__(self, name: str) -> Any:
        raise self._cause


class _BackendWork(Work):
    """Wrapper for torch's `Work` of a collective, or of a batch of nccl messages.

    Args:
        work: Torch's `Work`; None for an empty collective, which moves nothing.
        timeout_s: Default timeout of a wait.
    """

    def __init__(self, work: Any, timeout_s: float) -> None:
        self.work = work
        self._timeout_s = timeout_s
        self._error: BaseException | None = None

    def fail(self, cause: BaseException) -> None:
        """Record that the group failed before this work was done."""
        self._error = cause

    def is_finished(self) -> bool:
        """Return whether torch reports that its `Work` has ended, which it never does for gloo's reduce_scatter."""
        # Read `work` once, because a wait in another thread may drop it.
        work = self.work
        try:
            return work is None or bool(work.is_completed())
        except RuntimeError:
            # The device has failed, so the work makes no more progress.
            return True

    def is_completed(self) -> bool:
        return self._error is not None or self.is_finished()

    def exception(self) -> BaseException | None:
        return self._error

    def get_future(self) -> torch.futures.Future[None]:
        raise NotImplementedError("torch's own work inside a collective has no future; call wait()")


class _StreamWork(_BackendWork):
    """NCCL's work. As in torch, `wait` returns at once and makes the current stream wait, without a timeout.

    Timeouts are ignored because earlier kernels on the stream may take arbitrarily long, and torch would abort the
    whole group when a timeout expires.
    """

    def wait(self, timeout: Timeout | None = None) -> None:
        if self._error is None and self.work is not None:
            try:
                # Don't drop the work after the wait: it keeps its tensors alive while the stream uses them.
                self.work.wait()
            except RuntimeError as error:
                self._error = self._error or translated(error, [])
                raise self._error from error
        if self._error is not None:
            raise self._error


class _PolledWork(_BackendWork):
    """Gloo's work. A wait is split into time slices, so that an error from `broken` can end the wait after any slice.

    Args:
        work, timeout_s: See `_BackendWork`.
        broken: Function that returns the error that waits must raise, or None.
    """

    def __init__(self, work: Any, timeout_s: float, broken: Callable[[], BaseException | None]) -> None:
        super().__init__(work, timeout_s)
        self._broken = broken

    def wait(self, timeout: Timeout | None = None) -> None:
        if self._error is not None:
            raise self._error
        started = clock.now()
        try:
            if self.work is not None:
                self._wait_until(started + resolve_timeout(timeout, self._timeout_s))
                # Drop the work, because it keeps its tensors alive.
                self.work = None
        except CommError as error:
            self._error = error
            raise
        except RuntimeError as error:
            self._error = translated(error, [], clock.now() - started)
            raise self._error from error

    def _wait_until(self, deadline: float) -> None:
        while True:
            left = deadline - clock.now()
            last = left <= _SLICE_S or self.work.is_completed()
            try:
                # Never pass zero, which torch treats as no timeout.
                self.work.wait(timedelta(seconds=max(left if last else _SLICE_S, 0.001)))
            except CommError:
                # The control store raised this error while gloo was making a connection lazily. Don't wait again,
                # because torch cannot raise the same error twice.
                raise
            except RuntimeError:
                if last:
                    raise
                cause = self._broken()
                if cause is not None:
                    raise cause from None
            else:
                return


TRANSPORT = TorchTransport


def translated(error: RuntimeError, messages: Sequence[Message], waited_s: float = 0.0) -> CommError:
    """Translate an error from torch. Gloo never names a lost rank; the control plane reports it instead."""
    text = str(error)
    if re.search(r"[Tt]imed? ?out|timeout", text):
        return timeout_error(messages, waited_s)
    peer = messages[0].peer if len(messages) == 1 else None
    if re.search(r"[Cc]onnection (closed|reset|refused)|Broken pipe|closure|EOF", text):
        # Another rank may have failed before this peer; the control plane reports the first failure.
        return connection_error(peer)
    return CommError(f"torch.distributed failed: {text.splitlines()[0]}", peer=peer)
