"""Calls that an agent makes, from the request to the answer."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from unisono.core.mailbox import Envelope
from unisono.core.types import Timeout
from unisono.core.work import positive_timeout
from unisono.errors import ClosedError, CommError, PeerLostError
from unisono.rpc import protocol
from unisono.rpc.context import context, request
from unisono.rpc.exported import name_of
from unisono.rpc.pending_calls import CallFuture, FlowControl, PendingCall
from unisono.rpc.protocol import HEADER
from unisono.rpc.receiver import Task
from unisono.rpc.remote_errors import rebuilt
from unisono.rpc.router import SEND_S, rollback
from unisono.rpc.rref import RRef
from unisono.rpc.serialize import pack, unpack

if TYPE_CHECKING:
    from unisono.rpc.agent import Agent

__all__ = ["Client"]


class Client:
    """Makes calls.

    Args:
        agent: Agent that makes these calls.
        windows: Flow control of each rank.

    Attributes:
        sent: Number of requests sent to each rank.
    """

    def __init__(self, agent: Agent, windows: Sequence[FlowControl]) -> None:
        self._agent, self._calls, self._windows = agent, agent.calls, windows
        self.sent: Counter[int] = Counter()
        self._counting = threading.Lock()
        self._here = threading.local()

    def target(self, func: Callable[..., Any], args: Any) -> tuple[str, tuple[Any, ...]]:
        """Return the name to call and its arguments. A nameless function is sent along, if peers are trusted."""
        if type(args) is not tuple and (isinstance(args, str | bytes) or not isinstance(args, Sequence)):
            # A tensor could be unpacked, but a caller that forgot a comma did not mean that.
            raise TypeError(
                f"args must be a tuple of arguments, not a {type(args).__name__}; for a single argument pass args=(x,)"
            )
        exposed = self._agent.exposed
        try:
            name = name_of(func)
        except TypeError:
            if not exposed.trusted:
                raise
            name = ""
        if exposed.trusted and not exposed.finds(name, func):
            return "@call", (func, *args)
        return name, tuple(args)

    def call(self, peer: int, target: str, key: Any, args: Any, kwargs: Any, timeout: Timeout | None) -> Any:
        """Call a function, or a method of the object of this key, and wait for the result."""
        agent = self._agent
        call = PendingCall(self._calls.number(), peer, target, self._patience(timeout))
        self._request(call, protocol.REQUEST, (target, key, args, kwargs or {}))
        if not call.done:
            with agent.workers.not_counted():
                agent.receiver.wait_for_reply(call, call.timeout)
            if not call.done:
                self.give_up(call, call.late())
        return self._result(call)

    def start(self, peer: int, target: str, key: Any, args: Any, kwargs: Any, timeout: Timeout | None) -> CallFuture:
        """Start a call and return its future immediately."""
        call = self._with_future(peer, target, timeout)
        self._request(call, protocol.REQUEST, (target, key, args, kwargs or {}))
        assert call.future is not None
        return call.future

    def make(self, peer: int, target: str, key: Any, args: Any, kwargs: Any, timeout: Timeout | None) -> RRef[Any]:
        """Start a call that leaves its result on the callee."""
        call = self._with_future(peer, target, timeout)
        references = self._agent.references
        new = references.new_key(peer)
        try:
            self._request(call, protocol.REMOTE, (new.number, target, key, args, kwargs or {}))
        except CommError:
            # It may have reached the owner all the same.
            references.dropped(peer, new)
            raise
        except Exception:
            references.unused(peer, new)
            raise
        return references.reference(peer, new, call.future)

    def _with_future(self, peer: int, target: str, timeout: Timeout | None) -> PendingCall:
        agent, future = self._agent, CallFuture()
        call = PendingCall(self._calls.number(), peer, target, self._patience(timeout), future)

        def attend() -> None:
            with agent.workers.not_counted():
                agent.receiver.wait_for_reply(call, call.timeout)

        future._attend, future._cancel = attend, lambda: self.give_up(call, call.cancelled())
        return call

    def _patience(self, timeout: Timeout | None) -> float:
        return self._agent.timeout if timeout is None else positive_timeout(timeout)

    def _request(self, call: PendingCall, kind: int, values: Sequence[object]) -> None:
        agent, peer = self._agent, call.peer
        if agent.closed:
            raise self.closed()
        head, bodies, undo = pack(agent, peer, kind, call.number, context.get(), values)
        call.nbytes = len(head) + sum([body.numel() for body in bodies])
        nested, deadline = request.get() is not None, call.started + call.timeout
        if not self._windows[peer].enter(call.nbytes, deadline, agent.workers.not_counted, nested):
            rollback(undo)
            raise call.late()
        self._calls.add(call)
        try:
            agent.office.post(peer, head, bodies, min(call.timeout, SEND_S))
        except BaseException as error:
            # Also on an interrupt: no call may stay pending that no peer will answer.
            self._calls.pop(call.number)
            self._calls.forget(call)
            if not agent.office.may_arrive(peer, error):
                rollback(undo)
                raise
            # It will be served, or found cancelled.
            self._count(peer)
            agent.office.send_control(peer, protocol.CANCEL, call.number)
            raise
        self._count(peer)
        if (peer in agent.office.gone or agent.closed) and self._calls.pop(call.number) is not None:
            # The peer left or this agent was closed while this call was in flight, after pending calls were failed.
            self._end(call, self.closed() if agent.closed else agent.box.lost[peer])

    def _count(self, peer: int) -> None:
        with self._counting:
            self.sent[peer] += 1

    # -- ends ----------------------------------------------------------------------------------
    def answered(self, number: int, mail: Envelope) -> tuple[Task, bool] | None:
        """Handle an answer: return the remaining work, and whether it is short."""
        call = self._calls.pop(number)
        if call is None:
            # No caller waits, but the references in it have to be counted and dropped.
            return lambda: self._drop(mail), True
        call.mail = mail
        if call.future is None:
            self._calls.forget(call)
            call.end()
            return None
        return lambda: self._end(call, None), True

    def give_up(self, call: PendingCall, error: CommError) -> bool:
        """End a call without its answer and send a cancel to its peer; False if it was answered meanwhile."""
        if self._calls.pop(call.number) is None:
            return False
        self._agent.office.send_control(call.peer, protocol.CANCEL, call.number)
        self._end(call, error)
        return True

    def lose(self, peer: int, error: BaseException) -> None:
        """Fail the pending calls of a lost rank."""
        for call in self._calls.of(peer):
            if self._calls.pop(call.number) is not None:
                self._end(call, error)

    def end_all(self) -> None:
        """Fail all pending calls: the agent is closed."""
        for call in self._calls.all():
            if self._calls.pop(call.number) is not None:
                self._end(call, self.closed())

    def closed(self) -> ClosedError:
        """Return the error of a call after the agent has been closed."""
        rank, size = self._agent.rank, self._agent.size
        return ClosedError("the RPC agent of this rank is shut down", rank=rank, size=size, operation="rpc")

    def _end(self, call: PendingCall, error: BaseException | None) -> None:
        call.error = error
        try:
            if call.future is not None:
                self._complete(call.future, call)
        finally:
            self._calls.forget(call)
            # Last, so that a woken waiter finds the future complete.
            call.end()

    def _complete(self, future: CallFuture, call: PendingCall) -> None:
        """Complete a future and run its callbacks here. A future completed elsewhere is left as it is."""
        before, self._here.call = getattr(self._here, "call", None), call
        within, asked = context.set(call.within[0]), request.set(call.within[1])
        try:
            value = self._result(call)
        except Exception as raised:
            if not future.done():
                future.set_exception(raised)
        else:
            if not future.done():
                future.set_result(value)
        finally:
            context.reset(within)
            request.reset(asked)
            self._here.call = before

    def leave_callback(self) -> None:
        """Stop counting a call as pending if this thread runs its callback."""
        call = getattr(self._here, "call", None)
        if call is not None:
            self._calls.forget(call)

    def _result(self, call: PendingCall) -> Any:
        if call.mail is None:
            assert call.error is not None
            if isinstance(call.error, PeerLostError):
                # One error may end many calls, and each is raised with a traceback of its own.
                raise PeerLostError(call.error.message, peer=call.peer, operation="rpc") from call.error
            raise call.error
        return self._read(call.mail)

    def _read(self, mail: Envelope) -> Any:
        kind, _, within, message = HEADER.unpack_from(mail.head)
        (value,) = unpack(self._agent, mail, within, message, HEADER.size, 1)
        if kind == protocol.ERROR:
            raise rebuilt(value, mail.peer)
        return value

    def _drop(self, mail: Envelope) -> None:
        # No caller waits for it, so its errors are ignored; but references in it have to be counted and dropped.
        with contextlib.suppress(Exception):
            self._read(mail)
