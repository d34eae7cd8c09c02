"""Records a rank: the data that it receives, and digests of the data that it sends."""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from threading import get_ident
from typing import Any, cast

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from unisono.checkpoint.tree import RNG
from unisono.communicator import Communicator, engine_of, replace_transport
from unisono.core.call import Call, Fingerprint
from unisono.core.closing import Closing
from unisono.core.control import ControlPlane
from unisono.core.flight_recorder import callers_place, site_text
from unisono.core.staging import digest
from unisono.core.transport import Mailbox, Transport, share_capabilities
from unisono.core.types import Message, PointToPoint, Recv, Timeout, Work
from unisono.core.work import ChainedWork, Completion, raised_by
from unisono.errors import CommError, UnavailableError
from unisono.recording.log import LogWriter, path_of, words_of
from unisono.wrappers.base import Wrapper

__all__ = ["ATTRIBUTES", "ControlReplies", "Recorded", "Recording", "begin", "described", "key_of"]

ATTRIBUTES = ("native", "tags", "any_source", "balanced", "devices", "host_staged", "overlaps", "background")
"""Attributes of a transport that a program or this library may depend on, so a replay must restore them."""

_REPLIES: dict[str, int] = {
    "get": 1,
    "add": 1,
    "compare_set": 1,
    "check": 1,
    "delete": 1,
    "num_keys": 0,
    "exchange": 2,
    "exchange_unless_equal": 2,
    "report_failure": 1,
    "first_cause": 1,
    "rebuild": 2,
    "query": 1,
    "measured": 2,
    "stop_verdict": 1,
}
"""Control-plane methods whose replies are recorded, with the number of leading arguments that identify a request."""

_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
"""Environment variables from which a script reads its rank."""


class Recording(Closing):
    """A recording in progress, as returned by `un.record`: a context manager that ends the recording on exit."""

    def __init__(
        self, log: LogWriter | None, steps: int | None = None, after: Callable[[], None] = lambda: None
    ) -> None:
        self._log = log
        self._after = after
        self._owner = get_ident()
        self._left = steps
        if steps is not None:
            with _registering:
                _register()
            _counting.append(self)

    @property
    def nbytes(self) -> int:
        """Bytes written so far; 0 in a replay."""
        return 0 if self._log is None else self._log.nbytes

    def close(self) -> None:
        """End the recording; the communicator remains usable. Idempotent."""
        if self._log is None or self._log.closed:
            return
        with suppress(ValueError):
            _counting.remove(self)
        self._log.put(("end",), None)
        self._log.close()
        self._after()

    def stepped(self) -> None:
        """Count an optimizer step; end the recording after the last step to record."""
        # If ranks are threads, the optimizer hook also runs for other ranks' steps, so check that this is the recording
        # rank's thread.
        if get_ident() == self._owner and self._left is not None:
            self._left -= 1
            if self._left == 0:
                self.close()


_counting: list[Recording] = []
"""Recordings that end after a number of optimizer steps."""

_registering = threading.Lock()


@cache
def _register() -> None:
    """Call `_stepped` after each optimizer step from now on."""
    # One hook serves all recordings and remains registered, because removing it is unsafe. Torch iterates over its
    # hooks while it calls them. If a recording ended and removed its hook from inside the hook or in another rank's
    # thread, the optimizer step would fail with "OrderedDict mutated during iteration".
    register_optimizer_step_post_hook(_stepped)


def _stepped(*_: Any) -> None:
    for recording in tuple(_counting):
        recording.stepped()


def begin(folder: str | Path, comm: Communicator, steps: int | None) -> Recording:
    """Begin recording a rank; see `un.record`."""
    engine = engine_of(comm)
    group = engine.group
    path = path_of(folder, group.members[group.rank])
    path.parent.mkdir(parents=True, exist_ok=True)
    log = LogWriter(path)
    transport = engine.transport
    options = engine.options
    header = {
        "rank": group.rank,
        "members": group.members,
        "name": group.name,
        "options": (options.backend, options.device, options.timeout_s, options.chunk_bytes, options.deterministic),
        "checked": engine.checked,
        "hosts": comm.hosts,
        "attributes": {name: getattr(transport, name) for name in ATTRIBUTES},
        "random": RNG().state_dict(),
        "threads": torch.get_num_threads(),
        "environment": {name: os.environ[name] for name in _PLACE if name in os.environ},
        "torch": str(torch.__version__),
    }
    log.put(("header",), header)
    control = engine.control
    replace_transport(comm, Recorded(transport, log), cast("ControlPlane", ControlReplies(control, partial(_ask, log))))
    watched = weakref.ref(comm)

    def restore() -> None:
        there = watched()
        if there is not None:
            replace_transport(there, transport, control)

    recording = Recording(log, steps, restore)
    comm.after_close(recording.close)
    return recording


def described(call: Call) -> dict[str, Any]:
    """Return a transport-independent description of a call, with digests of the data that the call sends."""
    fingerprint: Fingerprint = call.fingerprint
    arguments = ("operation", "op", "root", "dtype", "counts", "device", "sends", "receives", "shape")
    return {
        **{name: getattr(fingerprint, name) for name in arguments},
        "digests": [digest(tensor) for tensor in call.inputs],
        "site": site_text(fingerprint.site),
    }


class Recorded(Wrapper):
    """Transport that records a rank. Collectives run entirely on the wrapped transport, so results are unchanged.

    Args:
        inner: The transport to record.
        log: File to write to.
    """

    def __init__(self, inner: Transport, log: LogWriter) -> None:
        super().__init__(inner)
        share_capabilities(self, inner, "native", "overlaps", "background")
        self._log = log
        self._name = inner.group.name
        self._received = Counter[tuple[int, int]]()
        self._works = 0
        self._settling = _Settling(log, inner.group.name)

    def wrap_child(self, inner: Transport) -> Recorded:
        return Recorded(inner, self._log)

    def mailbox(self, group: Any) -> Mailbox | None:
        if self._log.closed:
            return self.inner.mailbox(group)
        raise UnavailableError("requests of rpc and pools arrive at any time, and are not recorded: close them first")

    # -- collectives ---------------------------------------------------------------------------
    def compare(self, call: Call, deadline: float) -> None:
        try:
            super().compare(call, deadline)
        except CommError as error:
            self._log.put(("refused", self._name, call.fingerprint.call), words_of(error))
            raise

    def run(self, call: Call, over: PointToPoint | None = None) -> Work:
        number = call.fingerprint.call
        if self._log.closed:
            return self.inner.run(call)
        self._log.put(("call", self._name, number), described(call))
        key = "result", self._name, number

        def note(error: BaseException) -> BaseException:
            # Record errors of any kind: a replay raises the first one again, and ignores what later waits recorded.
            self._log.put(key, words_of(error))
            return error

        try:
            # Run the whole call on the inner transport: only the call's result is recorded, not its messages.
            work = self.inner.run(call)
        except Exception as error:
            note(error)
            raise
        return ChainedWork(work, lambda: self._log.put(key, None, call.outputs), note)

    # -- messages ------------------------------------------------------------------------------
    def post(self, batch: Sequence[Message]) -> Work:
        if self._log.closed:
            return self.inner.post(batch)
        received: list[tuple[tuple[Any, ...], torch.Tensor]] = []
        for message in batch:
            peer = message.peer
            tag = message.tag
            if isinstance(message, Recv):
                self._received[peer, tag] += 1
                received.append((("recv", self._name, peer, tag, self._received[peer, tag]), message.tensor))
            else:
                sent = message.tensor.numel(), str(message.tensor.dtype), digest(message.tensor)
                self._log.put(("send", self._name, peer, tag), (*sent, site_text(callers_place())))
        return ChainedWork(self.inner.post(batch), lambda: self._arrived(received))

    def _arrived(self, received: Sequence[tuple[tuple[Any, ...], torch.Tensor]]) -> None:
        for key, tensor in received:
            self._log.put(key, None, [tensor])

    def iprobe(self, peer: int, tag: int) -> bool:
        found = self.inner.iprobe(peer, tag)
        if found:
            self._log.put(("match", self._name, tag), peer)
        return found

    # -- timing that the program can observe ---------------------------------------------------------
    def returned(self, work: Work) -> Work:
        self._works += 1
        return _RecordedWork(self.inner.returned(work), self._log, self._name, self._works, self._settling)

    def abort(self, cause: BaseException) -> None:
        self._log.put(("abort", self._name), words_of(cause))
        self.inner.abort(cause)


class _Settling:
    """Completes the futures of a communicator's `Work` objects one at a time, and records the order."""

    def __init__(self, log: LogWriter, group: str) -> None:
        self._log = log
        self._key = "settled", group
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, Callable[[], object]]] = deque()
        self._busy = False

    def settle(self, number: int, action: Callable[[], object]) -> None:
        """Complete a `Work`'s future, in this thread or in one that is already completing another future."""
        with self._lock:
            self._waiting.append((number, action))
            if self._busy:
                return
            self._busy = True
        while (following := self._next()) is not None:
            self._log.put(self._key, following[0])
            following[1]()

    def _next(self) -> tuple[int, Callable[[], object]] | None:
        with self._lock:
            self._busy = bool(self._waiting)
            return self._waiting.popleft() if self._busy else None


class _RecordedWork(ChainedWork):
    """Work that records every result that depends on timing."""

    def __init__(self, inner: Work, log: LogWriter, group: str, number: int, settling: _Settling) -> None:
        super().__init__(inner)
        self._log = log
        self._group = group
        self._number = number
        self._settling = settling
        self._asked = 0

    def _put(self, what: str, value: Any) -> None:
        self._log.put((what, self._group, self._number), value)

    def _put_asked(self) -> None:
        """Record how often `is_completed` returned False."""
        if self._asked:
            self._put("unfinished", self._asked)
            self._asked = 0

    def wait(self, timeout: Timeout | None = None) -> None:
        self._wait(self._inner.wait, timeout)

    def wait_received(self, timeout: Timeout | None = None) -> None:
        self._wait(self._inner.wait_received, timeout)

    def _wait(self, wait: Callable[[Timeout | None], None], timeout: Timeout | None) -> None:
        self._put_asked()
        try:
            wait(timeout)
        except Exception as error:
            # Record errors of any kind: a replay raises them again.
            self._put("wait", words_of(error))
            raise

    def is_completed(self) -> bool:
        ended = self._inner.is_completed()
        if ended:
            self._put_asked()
        else:
            self._asked += 1
        return ended

    def get_future(self) -> torch.futures.Future[None]:
        self._put_asked()
        ended = Completion(0.0)
        self._inner.get_future().add_done_callback(
            lambda inner: self._settling.settle(self._number, lambda: ended.complete(raised_by(inner.value)))
        )
        return ended.get_future()

    def cancel(self) -> bool:
        self._put_asked()
        done = self._inner.cancel()
        self._put("cancelled", done)
        return done


def key_of(name: str, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Return the recording key of a request to the control plane."""
    identity = [getattr(argument, "name", argument) for argument in arguments[: _REPLIES[name]]]
    return ("control", name, *(tuple(each) if isinstance(each, list) else each for each in identity))


def _ask(log: LogWriter, name: str, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return the control plane's reply, and record it."""
    key = key_of(name, arguments)
    try:
        reply = method(*arguments, **options)
    except CommError as error:
        log.put(key, ("raised", words_of(error)))
        raise
    log.put(key, ("replied", reply))
    return reply


class ControlReplies:
    """Control plane that passes requests with recorded replies to a function, and forwards all other calls.

    Args:
        inner: The control plane to forward to.
        ask: Function that returns the reply to a request. It takes the request's name, the method of `inner` that
            answers the request, and the arguments for that method.
    """

    connectable = False
    """Further connections between the ranks would not be recorded."""

    def __init__(self, inner: ControlPlane, ask: Callable[..., Any]) -> None:
        self._inner = inner
        self._ask = ask

    def __getattr__(self, name: str) -> Any:
        # A copy is asked for special methods before it has `_inner`.
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._inner, name)
        return partial(self._ask, name, found) if name in _REPLIES else found
