"""The engine's fast path: bookkeeping around a blocking native call on the caller's own tensors.

Budget: 1 us a call.
"""

from __future__ import annotations

from contextvars import ContextVar
from sys import _getframe
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING, Any

from torch.autograd.graph import increment_version

from unisono.comm.observed_calls import record_collective, record_message
from unisono.comm.state import ANY_THREAD, refuses
from unisono.core.call_site import NOT_THE_USERS
from unisono.core.failure import Cause, raise_caused
from unisono.core.fast_path import FastPath, Status, Tensors
from unisono.core.flight_recorder import Activity, CallRecord
from unisono.core.tracing import profiler
from unisono.core.work import resolve_timeout

if TYPE_CHECKING:
    from unisono.collectives.arguments import Splits
    from unisono.core.collective import Collective
    from unisono.core.fingerprint import Fingerprint
    from unisono.core.types import Timeout, Work

__all__ = ["FastPathCalls"]


class FastPathCalls:
    """Part of an engine that makes calls on its transport's fast path.

    Attributes:
        fast_path: The transport's, if it has one.
        activity, owner, closed: As of `CommunicatorState`.
        _inside: Threads that are in a collective; a signal handler there may not start another.
    """

    fast_path: FastPath | None
    activity: Activity
    owner: int | None
    closed: bool
    _broken: Cause | None
    _calls: int
    _pending: int
    _rank: int
    _inside: set[int]
    _limit_s: float
    _sink: ContextVar[Any]

    def collective(
        self,
        what: Collective,
        output: Tensors,
        input: Tensors,
        op: object,
        root: int | None,
        algorithm: str | None,
        async_op: bool,
        timeout: Timeout | None,
        /,
    ) -> Work | None:
        """Make a call with the caller's arguments, on the fast path if it is blocking and needs nothing else.

        Returns:
            None when it is done, or else the work in flight.
        """
        fast, here, sink = self.fast_path, get_ident(), self._sink.get()
        general = fast is None or async_op or algorithm is not None or (self.owner != here and self.owner != ANY_THREAD)
        busy = self._pending or self._inside or self._broken is not None or self.closed
        if general or busy or profiler._is_profiler_enabled:
            return self.general_collective(what, output, input, op, root, algorithm, async_op, timeout)
        assert fast is not None
        limit = self._limit_s if timeout is None else resolve_timeout(timeout)
        caller, activity = _getframe(2), self.activity
        while caller.f_code.co_filename.startswith(NOT_THE_USERS) and caller.f_back is not None:
            caller = caller.f_back
        detail = str(op or "") if root is None else f"root {root}"
        # The caller's record keeps no object alive, and is resolved to a line only on request.
        noted = (what.name, self._calls + 1, detail, (caller.f_code, caller.f_lasti))
        activity.enter(noted)
        self._inside.add(here)
        try:
            status = fast.collective(what, output, input, op, root, activity.since + limit)
            if status is Status.MISMATCH:
                fast.mismatch(self._fingerprint(what, output, input, op, root))
            if status is Status.OK:
                # Transports write past torch's functions.
                if output is not None and (root is None or what.writes(self._rank, root)):
                    increment_version(output)  # type: ignore[arg-type]  # no fast path takes other buffers
                activity.calls = self._calls = self._calls + 1
                activity.keep(noted)
                if sink is not None:
                    record_collective(sink, activity, what, (output, input), op, root)
        except BaseException as error:
            # Interrupts, too: others have seen a part of the call.
            raise_caused(self._report_collective(error, noted), error)
        finally:
            self._inside.discard(here)
            activity.leave()
        return (
            None
            if status is Status.OK
            else self.general_collective(what, output, input, op, root, None, False, timeout)
        )

    def try_message(self, name: str, tensor: Any, peer: Any, tag: int, timeout: Timeout | None, /) -> bool:
        """Send or receive ("send", "recv") on the fast path; return False, with no effect, if it needs more."""
        fast, here = self.fast_path, get_ident()
        if fast is None or self.owner != here or self._inside or self._broken is not None or self.closed:
            return False
        if profiler._is_profiler_enabled or not fast.takes(tensor, peer, tag):
            return False
        limit = self._limit_s if timeout is None else resolve_timeout(timeout)
        caller, activity = _getframe(2), self.activity
        while caller.f_code.co_filename.startswith(NOT_THE_USERS) and caller.f_back is not None:
            caller = caller.f_back
        detail = f"{'to' if name == 'send' else 'from'} rank {peer}{f', tag {tag}' if tag else ''}"
        noted = name, None, f"{detail}, {tensor.nbytes} B", (caller.f_code, caller.f_lasti)
        awaited = activity.post(name, peer, tag)
        activity.enter(noted, (awaited,))
        self._inside.add(here)
        try:
            status = fast.message(name, tensor, peer, tag, monotonic() + limit)
            if status is Status.OK and (sink := self._sink.get()) is not None:
                record_message(sink, activity, awaited, tag, tensor.nbytes)
        except BaseException as error:
            if refuses(error):
                activity.posted[awaited[:3]] -= 1
                raise
            raise_caused(self.report_failure(error, name, activity.messages + 1), error)
        finally:
            self._inside.discard(here)
            activity.leave()
        if status is Status.OK:
            activity.messages += 1
            activity.keep(noted)
            if name == "recv":
                increment_version(tensor)
        else:
            activity.posted[awaited[:3]] -= 1
        return status is Status.OK

    # -- what an engine adds ---------------------------------------------------------------------------
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
    ) -> Work | None:
        """Make a call by a plan; as `collective`."""
        raise NotImplementedError

    def _fingerprint(
        self, what: Collective, output: Tensors, input: Tensors, op: object, root: int | None
    ) -> Fingerprint:
        """Return the fingerprint of a call."""
        raise NotImplementedError

    def report_failure(self, error: BaseException, operation: str, call: int | None = None) -> BaseException:
        """As in `CommunicatorState`."""
        raise NotImplementedError

    def _report_collective(self, error: BaseException, noted: CallRecord) -> BaseException:
        """Return the error to raise for a failed call: the same, or another."""
        raise NotImplementedError
