"""Polls the mailbox, and passes each message to the handler of its kind."""

from __future__ import annotations

import os
import struct
import threading
from collections import deque
from collections.abc import Callable

from unisono.core import clock
from unisono.core.transport import Envelope, Mailbox
from unisono.errors import CommError
from unisono.rpc.pending_call import PendingCall
from unisono.rpc.workers import Task, Workers

__all__ = ["Dispatcher", "Handler"]

Handler = Callable[[Envelope], tuple[Task, bool] | None]
"""Function that handles a message quickly. It returns the remaining task and whether the task is short, or None."""

_SPINS = 30
_POLL_S = 1e-3
"""How long a waiting thread polls for its reply before it sleeps."""


class Dispatcher:
    """Polls the mailbox in one thread at a time, and passes messages to handlers.

    The receiving thread polls, and so does a thread that waits for a reply, because otherwise one thread would have to
    wake another. Only one thread may poll at a time, because messages from one rank must be handled in order. The
    polling thread must neither wait nor run users' functions, because no rank's messages would be handled in the
    meantime. Handlers therefore return tasks instead of running them.

    Args:
        box: The mailbox.
        workers: Threads that run tasks for messages that arrive while a thread polls for its reply.

    Attributes:
        handlers: Handler for each kind of message; all must be set before the first message is received.
        ended: Ranks whose loss has been handled or is being handled; their messages are dropped.
    """

    def __init__(self, box: Mailbox, workers: Workers) -> None:
        self._box = box
        self._workers = workers
        self.handlers: dict[int, Handler] = {}
        self.ended: set[int] = set()
        self._lock = threading.Lock()
        # Identifier of the polling thread. Only the thread that holds the lock writes this field; others compare it
        # with their own identifier.
        self._thread = 0

    @property
    def polling(self) -> bool:
        """Return whether this thread is polling.

        A polling thread must not send, because a send may wait for the receiver.
        """
        return self._thread == threading.get_ident()

    def poll(self, todo: deque[tuple[Task, bool]]) -> bool:
        """Dispatch the messages that have arrived; return whether there were any.

        Args:
            todo: Queue to which the remaining tasks are added, as pairs of a task and whether it is short.
        """
        if not self._lock.acquire(blocking=False):
            # Another thread is already polling while it waits for a reply. If it leaves messages behind, it wakes the
            # receiving thread.
            return False
        self._thread = threading.get_ident()
        try:
            messages = self._box.poll()
            todo.extend(task for message in messages if (task := self.dispatch(message)) is not None)
        finally:
            self._thread = 0
            self._lock.release()
        return bool(messages)

    def poll_for(self, call: PendingCall) -> Task | None:
        """Dispatch messages until a call has ended, or until further polling would cost more than sleeping.

        Returns: The task that completes the call's future, if the reply has arrived. Run the task only after `poll_for`
            has returned: the future's callbacks may take long, or wait for other calls, and replies arrive only while
            some thread can poll.
        """
        box = self._box
        if not box.eager or call.peer == box.group.rank or not self._lock.acquire(blocking=False):
            return None
        self._thread = threading.get_ident()
        awaited: Task | None = None
        spins = 0
        try:
            box.mute_wakeups()
            until = clock.now() + min(call.timeout, _POLL_S)
            while not call.done and awaited is None and (spins <= _SPINS or clock.now() <= until):
                messages = box.poll()
                for message in messages:
                    task = self.dispatch(message)
                    if task is None:
                        continue
                    if message is call.reply:
                        awaited = task[0]
                    else:
                        # Run even a short task in another thread, because this thread should continue as soon as its
                        # own reply is here.
                        self._workers.run(task[0])
                if not messages:
                    spins += 1
                    if spins > _SPINS:
                        os.sched_yield()
        finally:
            self._thread = 0
            # Release the lock before `unmute`: if messages are left, `unmute` wakes the receiving thread, which must
            # find the lock free.
            self._lock.release()
            box.unmute()
        return awaited

    def dispatch(self, message: Envelope) -> tuple[Task, bool] | None:
        """Handle one message. Return the task that remains to be run, if any, and whether it is short.

        Call this in the polling thread, or, for a message from this rank to itself, in any thread.
        """
        if message.peer in self.ended:
            return None
        try:
            return self.handlers[message.head[0]](message)
        except (ValueError, TypeError, LookupError, struct.error) as error:
            # Invalid message: receive nothing more from its sender.
            invalid = CommError(f"rank {message.peer} sent an invalid message: {error}", peer=message.peer)
            self._box.mark_lost(message.peer, invalid)
            return None

    def newly_lost(self) -> set[int]:
        """Return the ranks lost since the last call, whose messages are dropped from now on."""
        lost = self._box.lost.keys() - self.ended
        # Update `ended` before the loss is handled. A call may be added just after all pending calls have failed; its
        # thread notices this, because it checks `ended` after sending.
        self.ended |= lost
        return lost
