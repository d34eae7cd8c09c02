"""Ends calls with their replies, or with errors."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from unisono.core.transport import Envelope
from unisono.errors import CommError, PeerLostError
from unisono.rpc import protocol
from unisono.rpc.call_future import CallFuture
from unisono.rpc.channel import MessageChannel
from unisono.rpc.context import context, request
from unisono.rpc.pending_call import PendingCall
from unisono.rpc.pending_calls import PendingCalls
from unisono.rpc.protocol import HEADER
from unisono.rpc.remote_errors import rebuilt
from unisono.rpc.workers import Task

__all__ = ["Replies"]


class Replies:
    """Ends each call once: with its reply, or with an error if the call fails, times out or is cancelled.

    Each method first takes the call from the table, so that only one of several threads ends it.

    Args:
        channel: Channel that decodes replies, and notifies peers of cancelled calls.
        calls: Table of the calls.
    """

    def __init__(self, channel: MessageChannel, calls: PendingCalls) -> None:
        self._channel = channel
        self._calls = calls
        # For each thread, the call whose callbacks it is running.
        self._completing = threading.local()

    def answered(self, reply: Envelope) -> tuple[Task, bool] | None:
        """Handle a reply; return the remaining work, and whether it is short."""
        call = self._calls.take(HEADER.unpack_from(reply.head)[1])
        if call is None:
            return lambda: self._drop(reply), True
        call.reply = reply
        if call.future is None:
            # The waiting thread decodes the reply itself, so nothing remains to be done here.
            call.wake_waiter()
            return None
        return lambda: self._end(call), True

    def give_up(self, call: PendingCall, error: CommError) -> bool:
        """End a call without a reply, and notify its peer; return False if the reply arrived in the meantime."""
        if self._calls.take(call.number) is None:
            return False
        # Notify the peer before running the future's callbacks, which may take a long time.
        self.cancel(call)
        self._end(call, error)
        return True

    def fail(self, call: PendingCall, error: BaseException) -> None:
        """End a call whose peer does not answer any more, unless the call has ended."""
        if self._calls.take(call.number) is not None:
            self._end(call, error)

    def lose(self, peer: int) -> None:
        """End the calls to a lost rank with the error that reported its loss."""
        for call in self._calls.open(peer):
            self.fail(call, self._channel.box.lost[peer])

    def cancel(self, call: PendingCall) -> None:
        """Notify the peer that no thread waits for the reply any more."""
        self._channel.send_control(call.peer, protocol.CANCEL, call.number)

    def result(self, call: PendingCall) -> Any:
        """Return the value of a call that has ended, or raise its error."""
        if call.reply is None:
            assert call.error is not None
            if isinstance(call.error, PeerLostError):
                # One error may fail many calls, and each needs its own traceback.
                raise PeerLostError(call.error.message, peer=call.peer, operation="rpc") from call.error
            raise call.error
        (value,) = self._channel.unpack(call.reply, HEADER.size)
        if call.reply.head[0] == protocol.ERROR:
            raise rebuilt(value, call.peer)
        return value

    def leave_callback(self) -> None:
        """If this thread runs a callback of a call, stop counting the call as pending."""
        call = getattr(self._completing, "call", None)
        if call is not None:
            self._calls.finish(call)

    def _end(self, call: PendingCall, error: BaseException | None = None) -> None:
        """End a call that this thread has taken, with its reply or an error."""
        call.error = error
        try:
            if call.future is not None:
                self._complete(call, call.future)
        finally:
            self._calls.finish(call)
            # Wake the waiter last, so that it finds the future complete.
            call.wake_waiter()

    def _complete(self, call: PendingCall, future: CallFuture) -> None:
        """Complete a future and run its callbacks in this thread. A future that is complete remains unchanged."""
        # A callback may wait for another call, which is then completed in this thread, so save the outer call and
        # restore it afterwards.
        before = getattr(self._completing, "call", None)
        self._completing.call = call
        within = context.set(call.within[0])
        request_token = request.set(call.within[1])
        try:
            value = self.result(call)
        except Exception as raised:
            if not future.done():
                future.set_exception(raised)
        else:
            if not future.done():
                future.set_result(value)
        finally:
            context.reset(within)
            request.reset(request_token)
            self._completing.call = before

    def _drop(self, reply: Envelope) -> None:
        # No caller waits, so ignore errors. Still decode the reply, because references in it must be counted and
        # dropped.
        with contextlib.suppress(Exception):
            self._channel.unpack(reply, HEADER.size)
