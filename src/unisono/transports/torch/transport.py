"""Transport over torch.distributed: gloo, nccl and other backends, without torch's global groups."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from unisono.control.sockets import invalidate_after_fork
from unisono.control.torch_store import ControlStore
from unisono.core.call import Call
from unisono.core.control import ControlPlane
from unisono.core.group import Group
from unisono.core.staging import ACCELERATORS
from unisono.core.threads import DaemonThreadPool
from unisono.core.transport import Capabilities, Mailbox, Options, Transport
from unisono.core.types import COLLECTIVE_TAG, Message, PointToPoint, Recv, Send, Timeout, Work
from unisono.core.work import Completion, WorkGroup, resolve_timeout
from unisono.errors import ClosedError, CommError, CommTimeoutError
from unisono.transports.tcp.mailbox import TcpMailbox
from unisono.transports.thread import MessageQueue, ThreadTransport
from unisono.transports.torch.collectives import NATIVE, carries, start
from unisono.transports.torch.errors import translated
from unisono.transports.torch.gloo_sockets import Sockets
from unisono.transports.torch.point_to_point import Envelopes
from unisono.transports.torch.process_groups import backend_of

__all__ = ["TRANSPORT", "TorchTransport"]

_SLICE_S = 0.1
_ONE_READ_BYTES = 1 << 16
"""Longest message that mostly arrives in one read of its connection."""

_threads = DaemonThreadPool("unisono torch")
_FIRST_TAG = 1 << 28
"""Above the tags that the owner of a wrapped group is likely to use."""


class TorchTransport(Transport):
    """A torch process group, driven directly: no default group, no names registered with torch.

    With gloo, users' messages travel in an envelope with their length and dtype, because a gloo
    receive that does not fit ends the process. Collectives need none: they are compared before.
    """

    native = NATIVE
    overlaps = True
    latency_s = 150e-6
    second_per_byte = 1e-9

    def __init__(
        self, group: Group, backend: Any, control: ControlPlane, options: Options, *, owned: bool = True
    ) -> None:
        self.group, self._backend, self._control, self._options = group, backend, control, options
        self._owned = owned
        self._upward: Any = None
        self._sockets = Sockets()
        self._flying: list[Any] = []
        self._lock = threading.Lock()
        self._stores: list[ControlStore] = []
        declared = self.declared(options.backend)
        self.devices, self.host_staged, self.native = declared.devices, declared.host_staged, declared.native
        self._cuda = "cpu" not in self.devices
        self.tags = self.any_source = not self._cuda
        self._broken: BaseException | None = None
        self._envelopes = Envelopes(group, self._start, options.timeout_s)
        # Gloo has no connection from a rank to itself.
        self._to_oneself = ThreadTransport(group, MessageQueue(), options.timeout_s)
        invalidate_after_fork(self)

    def invalidate_after_fork(self) -> None:
        """Keep torch's backends for good in a forked child: their destructors wait for the parent's threads."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object((self._backend, self._upward)))

    @classmethod
    def declared(cls, backend: str) -> Capabilities:
        if backend in ("gloo", "mpi"):
            # Gloo's reduces the whole message on every rank: our algorithms are faster, but for a few bytes.
            return Capabilities(ACCELERATORS | {"cpu"}, ACCELERATORS, cls.native - {"reduce_scatter"})
        return Capabilities(frozenset({"cuda"}), frozenset(), cls.native)

    @classmethod
    def connect(cls, group: Group, control: ControlPlane, options: Options) -> TorchTransport:
        made = cls._made(group, control, options, lazy=False)
        if options.backend == "gloo":
            # Gloo writes a message in the caller's thread, under a lock of the connection, if its receive is known
            # already. Meanwhile its own thread cannot read from that connection, and spins, with few cores for a
            # whole tick of the scheduler. So incoming and outgoing data use different connections.
            store = ControlStore(control, f"torch/{group.name}/upward", group=group)
            made._upward = _backend(group, control, store, options, made._sockets, lazy=False)
            made._stores.append(store)
        made._sockets.look()
        return made

    @classmethod
    def _made(cls, group: Group, control: ControlPlane, options: Options, *, lazy: bool) -> TorchTransport:
        store = ControlStore(control, f"torch/{group.name}", group=group)
        sockets = Sockets()
        made = cls(group, _backend(group, control, store, options, sockets, lazy=lazy), control, options)
        made._sockets = sockets
        # C++ holds only its part of a store, which fails without the Python part.
        made._stores.append(store)
        return made

    def split(self, group: Group) -> TorchTransport:
        return self._made(group, self._control, self._options, lazy=True)

    def mailbox(self, group: Group) -> Mailbox:
        # Gloo's waits cannot be polled, so messages that no caller waits for get separate connections.
        return TcpMailbox(group, self._control, self._options.address, self._options.timeout_s)

    def reconfigure(self, group: Group) -> TorchTransport:
        return self.connect(group, self._control, self._options)

    # -- messages ------------------------------------------------------------------------------
    def post(self, batch: Sequence[Message]) -> Work:
        if self._broken is not None:
            return Completion.ended(self._broken)
        own = [message for message in batch if message.peer == self.rank]
        if own:
            others = [message for message in batch if message.peer != self.rank]
            works = [self._to_oneself.post(own), *([self.post(others)] if others else [])]
            return WorkGroup(works, self._options.timeout_s, _SLICE_S)
        if self._cuda:
            return self._post_grouped(batch)
        if batch and batch[0].tag != COLLECTIVE_TAG:
            return self._envelopes.post(batch)
        ordered = batch if self._upward is not None else sorted(batch, key=_send_first)
        moving = [(m, self._start(m, _FIRST_TAG, self._direction(m))) for m in ordered if m.tensor.numel()]
        return _GlooWork(moving, self._options.timeout_s, lambda: self._broken)

    def iprobe(self, peer: int, tag: int) -> bool:
        return self._to_oneself.iprobe(peer, tag) if peer == self.rank else self._envelopes.iprobe(peer, tag)

    def _direction(self, message: Message) -> Any:
        """Return the set of connections for a schedule's messages in this direction, if there are two sets."""
        upward = (message.peer > self.group.rank) == isinstance(message, Send)
        return self._backend if self._upward is None or not upward else self._upward

    def _start(self, message: Message, wire_tag: int, backend: Any = None) -> Any:
        """Start torch's own work of one message."""
        backend = backend or self._backend
        try:
            if isinstance(message, Recv):
                return backend.recv([message.tensor], message.peer, wire_tag)
            return backend.send([message.tensor], message.peer, wire_tag)
        except RuntimeError as error:
            raise translated(error, [message]) from error

    def _post_grouped(self, batch: Sequence[Message]) -> Work:
        """Post a batch as NCCL does: in one launch on the device's stream."""
        self._backend._start_coalescing()
        for message in batch:
            self._start(message, 0)
        return _GlooWork([(batch[0], self._backend._end_coalescing())] if batch else [], self._options.timeout_s)

    # -- native collectives --------------------------------------------------------------------
    def supports(self, call: Call) -> bool:
        return call.name in self.native and carries(call, self._cuda)

    def run(self, call: Call, over: PointToPoint | None = None) -> Work:
        if call.steps is not None:
            return super().run(call, over)
        return self._in_flight(partial(start, self._backend, call)) or _GlooWork([], self._options.timeout_s)

    def _in_flight(self, begin: Callable[[], Any]) -> Work | None:
        """Begin work and record it as in flight. Return None if there is none to wait for."""
        # An abort, called from another thread, has to see the work in flight.
        with self._lock:
            if self._broken is not None:
                raise self._broken
            try:
                work = begin()
            except RuntimeError as error:
                raise translated(error, []) from error
            if work is None:
                return None
            # A rank lost before it was connected never answers, and only the wait of this work can be ended.
            waited = _GlooWork([(None, work)], self._options.timeout_s, lambda: self._broken)
            if self._owned:
                self._flying = [known for known in self._flying if known.unfinished()] + [waited]
        return waited

    # -- end -----------------------------------------------------------------------------------
    def close(self) -> None:
        self._end(ClosedError("the communicator is closed"), lambda: False)

    def abort(self, cause: BaseException) -> None:
        # Ends gloo's own waits, here and at the peers.
        self._end(cause, self._sockets.shut)

    def _end(self, cause: BaseException, shut: Callable[[], bool]) -> None:
        """Detach the backend. Keep it while it waits: releasing a waiting gloo group blocks until its wait ends."""
        self._envelopes.close(cause)
        self._to_oneself.abort(cause)
        with self._lock:
            self._broken = self._broken or cause
            works = [work for known in self._flying for work in known.unfinished()]
            if shut() or works:
                _threads.run(partial(self._sockets.abandon, (self._backend, self._upward), works))
            # Works keep their own references.
            self._flying = []
            if self._upward is not None:
                self._upward = _DetachedGroup(cause)
            if self._owned:
                self._backend = _DetachedGroup(cause)


def _send_first(message: Message) -> bool:
    """Return the sort key that posts sends before receives: on one connection, data should meet no writing caller."""
    return isinstance(message, Recv)


class _DetachedGroup:
    """Placeholder of a backend after an abort."""

    def __init__(self, cause: BaseException) -> None:
        self._cause = cause

    def __getattr__(self, name: str) -> Any:
        raise self._cause


class _GlooWork(Work):
    """Torch's works of one batch. Gloo messages support waiting only."""

    def __init__(
        self,
        works: Sequence[tuple[Message | None, Any]],
        timeout_s: float,
        broken: Callable[[], BaseException | None] = lambda: None,
    ) -> None:
        self._works, self._timeout_s, self._broken = works, timeout_s, broken
        self._error: BaseException | None = None

    def wait(self, timeout: Timeout | None = None) -> None:
        self._wait(timeout, self._works)
        self._works = []

    def wait_received(self, timeout: Timeout | None = None) -> None:
        self._wait(timeout, [item for item in self._works if isinstance(item[0], Recv)])
        self._works = [item for item in self._works if not isinstance(item[0], Recv)]

    def _wait(self, timeout: Timeout | None, works: Sequence[tuple[Message | None, Any]]) -> None:
        if self._error is not None:
            raise self._error
        if any(message is not None and message.tensor.nbytes > _ONE_READ_BYTES for message, _ in works):
            self._wait_beside(timeout, works)
        else:
            self._wait_here(timeout, works)

    def _wait_beside(self, timeout: Timeout | None, works: Sequence[tuple[Message | None, Any]]) -> None:
        """Wait in another thread. Gloo does not end the wait for a message whose connection broke halfway."""
        done = Completion(0.0)

        def wait() -> None:
            try:
                self._wait_here(timeout, works)
            except BaseException as error:
                done.complete(error)
            else:
                done.complete()

        _threads.run(wait)
        while not done.is_completed():
            try:
                done.wait(_SLICE_S)
            except CommTimeoutError:
                self._error = self._error or self._broken()
                if self._error is not None:
                    raise self._error from None
        done.wait()

    def _wait_here(self, timeout: Timeout | None, works: Sequence[tuple[Message | None, Any]]) -> None:
        started = time.monotonic()
        deadline = started + resolve_timeout(timeout, self._timeout_s)
        for message, work in works:
            try:
                _wait_for(work, deadline, None if message is not None else self._broken)
            except CommError as error:
                self._error = error
                raise
            except RuntimeError as error:
                waited = time.monotonic() - started
                self._error = translated(error, [message] if message is not None else [], waited)
                raise self._error from error

    def unfinished(self) -> list[Any]:
        """Return torch's works that may be running: torch never reports a reduce_scatter of gloo as completed."""
        return [work for _, work in self._works if not work.is_completed()]

    def is_completed(self) -> bool:
        return self._error is not None or all(work.is_completed() for _, work in self._works)

    def exception(self) -> BaseException | None:
        return self._error

    def get_future(self) -> torch.futures.Future[None]:
        raise NotImplementedError("messages inside a collective have no future; call wait()")


def _wait_for(work: Any, deadline: float, broken: Callable[[], BaseException | None] | None) -> None:
    """Wait for torch's work. A message wait that ends early breaks its connection; a collective's can be repeated."""
    while True:
        left = deadline - time.monotonic()
        last = broken is None or left <= _SLICE_S or work.is_completed()
        try:
            # A timeout of zero would mean no timeout.
            work.wait(timedelta(seconds=max(left if last else _SLICE_S, 0.001)))
        except CommError:
            # Raised by the control store, which lazy connections use. Torch cannot raise it twice.
            raise
        except RuntimeError:
            if last:
                raise
            cause = broken() if broken is not None else None
            if cause is not None:
                raise cause from None
        else:
            return


def _backend(
    group: Group, control: ControlPlane, store: ControlStore, options: Options, sockets: Sockets, *, lazy: bool
) -> Any:
    try:
        return backend_of(group, control, store, options, sockets, lazy=lazy)
    except CommError:
        raise
    except RuntimeError as error:
        raise translated(error, []) from error


TRANSPORT = TorchTransport
