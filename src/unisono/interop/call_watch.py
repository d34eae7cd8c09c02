"""Watches torch's process groups on a rank: reports calls to the monitor, and raises errors that the monitor finds."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Literal, NamedTuple, NoReturn, Self
from weakref import WeakKeyDictionary

import torch.distributed as dist

from unisono import serialization
from unisono.control.call_monitor import CallControl, start_monitor
from unisono.control.process_exit import close_at_exit
from unisono.control.watched_calls import CALL, follows
from unisono.core import clock
from unisono.core.call import Fingerprint
from unisono.core.failure import Cause, error_of, text_of
from unisono.core.flight_recorder import (
    Activity,
    PendingMessage,
    Place,
    Record,
    callers_places,
    is_users,
    site_text,
    thread_frames,
    with_callers,
)
from unisono.core.forks import invalidate_after_fork
from unisono.core.group import Group
from unisono.core.threads import spawn_thread
from unisono.core.types import Timeout
from unisono.core.work import positive_timeout
from unisono.errors import CommError
from unisono.host.network import address_for_others, host_identity, in_zone_of
from unisono.interop.call_signatures import OPERATIONS, Form, Signature, form_of, signature_of
from unisono.interop.dispatched_calls import Operator, result_of, watch_with
from unisono.interop.from_store import publish, read

__all__ = ["EXIT_STATUS", "Watch", "watch", "watch_at_init"]

_Check = Literal["after", "before"]

EXIT_STATUS = 70
"""Exit status of a process that the watch terminates because it is stuck in a call or makes no more calls."""

_MEET_WITHIN_S = 60.0
_SHARE = 0.9
"""Fraction of a group's own timeout after which the watch reports missing ranks, before torch's own error."""
_ASYNC_WAITS_S = 0.05
_BLOCKED_S = 0.3
_BUSY_S = 5.0
_CAUSE_S = 1.5
_POLL_S = 0.02
_MOST_SIGNATURES = 1 << 14
_CODES: dict[str | None, int] = {None: 0, **{name: code for code, name in enumerate(OPERATIONS, 1)}}

_NOT_WATCHED = {
    "unisono": "it compares its calls by itself",
    "fake": "its ranks do not exist",
    "threaded": "its ranks are threads of one process",
}

_watch: Watch | None = None
_counted: Counter[str] = Counter()


class _WatchedGroup(Activity):
    """A torch process group and its calls. Reports also tell whether another thread could make the awaited call.

    Attributes:
        index: Number by which reports refer to the group.
        text: Name of the group in error messages.
        reported: Number of collectives reported to the monitor, or about to run. A call that waits is counted here as
            it begins, but in the inherited `calls`, which hang reports show, only once it has returned.
        limited: Whether the current call has its own timeout, after which the program can continue.
        callers: Threads that have made calls.
    """

    def __init__(self, index: int, group: Group, text: str, callers: set[int]) -> None:
        super().__init__(group)
        self.index = index
        self.text = text
        self.reported = 0
        self.limited = False
        self.callers = callers

    def to_dict(self) -> dict[str, Any]:
        found = super().to_dict()
        # A thread that runs the program's own code may be about to make its first call.
        found["aside"] = found["inside"] and (
            self.limited
            or any(
                thread in self.callers or any(is_users(each.f_code.co_filename) for each in with_callers(frame))
                for thread, frame in thread_frames().items()
                if thread != self.owner
            )
        )
        return found


class _Message(NamedTuple):
    """A message whose end nobody has waited for yet: its group, its record, and its identity for reports."""

    where: _WatchedGroup
    record: tuple[str, None, str, Place]
    awaited: tuple[PendingMessage, ...]


class Watch:
    """Watches this process's process groups; created by `watch`. A context manager that closes the watch on exit.

    An error that propagates out of the context manager is reported to the other ranks.

    Args:
        control: Connection to the monitor.
        group: The watched ranks.
        ranks: Ranks of the watched processes in torch's default group.
        check: As for `watch`.
        limit_s: Seconds after which missing ranks are reported; None for nine tenths of each group's timeout.
    """

    def __init__(
        self, control: CallControl, group: Group, ranks: list[int], check: _Check, limit_s: float | None
    ) -> None:
        self._control = control
        self._group = group
        self._ranks = ranks
        self._before = check == "before"
        self._limit_s = limit_s
        self._groups: dict[str, _WatchedGroup | None] = {}
        self._signatures: dict[Any, tuple[int, Signature]] = {}
        self._threads: set[int] = set()
        self._lock = threading.Lock()
        self._messages: WeakKeyDictionary[dist.Work, _Message] = WeakKeyDictionary()
        # Keeps the Python object of the latest message alive until torch returns the same object to the caller.
        self._latest: dist.Work | None = None
        self._cause: Cause | None = None
        # Set after the cause of a failure has been printed. A process must print the cause of its exit before it exits.
        self._reported = threading.Event()
        # The number of this rank's threads that are in a call, and whether a thread has raised the watch's error.
        self._inside = 0
        self._raised = False

    def close(self) -> None:
        """End the watch. Once one rank has ended its watch, calls are no longer compared on any rank. Idempotent."""
        with contextlib.suppress(CommError):
            self._control.tell("finish")
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        message = f"rank {self._group.rank} failed: {type(error).__name__}: {text_of(error)}"
        with contextlib.suppress(CommError):
            self._control.report_failure(self._group, Cause("PeerLostError", self._group.rank, message))
        self._close()

    def invalidate_after_fork(self) -> None:
        """Stop watching in a forked child, because the connection belongs to the parent."""
        self._forget()

    def _forget(self) -> None:
        global _watch  # noqa: PLW0603
        if _watch is self:
            _watch = None

    def _close(self) -> None:
        self._forget()
        self._raised = True
        with contextlib.suppress(CommError):
            self._control.leave(self._group)
        self._control.close()

    # -- each call -----------------------------------------------------------------------------
    def seen(self, form: Form, pg: dist.ProcessGroup, make: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        """Report a call, make it, and return its result; see `unisono.interop.dispatched_calls.watch_with`."""
        name = pg.group_name
        where = self._groups[name] if name in self._groups else self._introduce(name, pg)
        if where is None:
            return make()
        if self._cause is not None:
            self._raise(form, where, where.reported + 1)
        message = form.message(args)
        return self._call(form, where, args, make) if message is None else self._post(form, where, *message, make)

    def _call(self, form: Form, where: _WatchedGroup, args: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Report a collective, make it, and return its result."""
        waits = form.waits(args)
        limit_s = form.timeout_s(args) if waits else _ASYNC_WAITS_S
        reported = self._report(form, where, args)
        if reported is None:
            return make()
        number, detail, content = reported
        place = detail.site
        if not waits:
            where.note(form.operation, number, detail, place)
            if self._before:
                self._compare(content, limit_s, self._place(form, where, number))
            return make()
        record = self._enter(where, form.operation, number, detail, place, limited=limit_s is not None)
        try:
            if self._before:
                self._compare(content, limit_s, self._place(form, where, number))
            made = make()
            if (work := result_of(made)) is not None:
                work.wait()
            return made
        except CommError:
            raise
        except RuntimeError as error:
            self._explain(error, form, where, number)
            # The caller may catch the error and continue, so tell the monitor not to expect this call from other ranks.
            with contextlib.suppress(CommError):
                self._control.tell("abandon", where.index, number)
            raise
        finally:
            self._inside -= 1
            where.leave()
            where.keep(record)
            where.calls = number

    def _enter(self, where: _WatchedGroup, *call: Any, limited: bool) -> Record:
        """Mark a call as running; the arguments after the group are those of `Activity.enter`."""
        where.owner = threading.get_ident()
        where.limited = limited
        self._inside += 1
        return where.enter(*call)

    def _post(self, form: Form, where: _WatchedGroup, peer: int | None, tag: int, make: Callable[[], Any]) -> Any:
        """Post a message. Messages are not compared; the monitor asks for those that ranks wait for."""
        kind = form.operation
        self._threads.add(threading.get_ident())
        # A receive from any rank may match any sender's message, so post it for all ranks; it waits for no particular
        # rank.
        posted = tuple(where.post(kind, other, tag) for other in (range(where.group.size) if peer is None else (peer,)))
        name = "any rank" if peer is None else f"rank {where.group.members[peer]}"
        record = (kind, None, f"{'to' if kind == 'send' else 'from'} {name}, tag {tag}", callers_places()[1])
        where.note(*record)
        made = make()
        if (work := result_of(made)) is not None:
            self._latest = work
            self._messages[work] = _Message(where, record, () if peer is None else posted)
        return made

    def wait(self, work: dist.Work, wait: Callable[[dist.Work], bool]) -> bool:
        """Wait for a work by torch's method. If it is a message, reports tell that this rank is waiting."""
        message = self._messages.pop(work, None)
        if message is None:
            return wait(work)
        if self._latest is work:
            self._latest = None
        self._enter(message.where, *message.record, message.awaited, limited=False)
        try:
            return wait(work)
        finally:
            self._inside -= 1
            message.where.leave()

    def _report(self, form: Form, where: _WatchedGroup, args: tuple[Any, ...]) -> tuple[int, Fingerprint, bytes] | None:
        """Report a call, unless it must be compared before it runs; return its number, fingerprint and encoded report.

        Returns None for a call on meta tensors, which transfers nothing.
        """
        places = callers_places()
        op = form.op(args)
        key = (form.key(args), places, op, where.group.size)
        # Number and report the call under one lock, so that a group's reports arrive in the order of its calls.
        with self._lock:
            index, signature = self._signatures.get(key) or self._describe(key, form, args)
            if signature.fingerprint.device == "meta":
                # A compiler or FakeTensorMode only infers the result's shape, and may do so on this rank alone.
                return None
            where.reported += 1
            number = where.reported
            self._threads.add(threading.get_ident())
            content = CALL.pack(where.index, number, signature.same, index, _CODES[op])
            if not self._before:
                self._control.call(content)
        return number, signature.fingerprint, content

    def _introduce(self, name: str, pg: dist.ProcessGroup) -> _WatchedGroup | None:
        """Start watching a group, or return None if it cannot be watched, for example if some ranks are not watched."""
        known = pg in dist.distributed_c10d._world.pg_map and not _why_not(pg)
        members = dist.get_process_group_ranks(pg) if known else []
        with self._lock:
            if not members or not {*members} <= {*self._ranks}:
                self._groups[name] = None
                return None
            places = tuple(map(self._ranks.index, members))
            group = Group(f"{self._group.name}/{name}", places.index(self._group.rank), places)
            text = f"group {name!r} of ranks {', '.join(map(str, places))}"
            if pg is dist.group.WORLD:
                # Hang reports look up a rank's calls under the name of the group that the rank has joined.
                group = self._group
                text = "world"
            index = sum(each is not None for each in self._groups.values())
            found = _WatchedGroup(index, group, text, self._threads)
            self._control.tell("group", group.name, text, list(places), self._limit_s or _SHARE * _timeout_s(pg))
            self._control.watch(found)
            self._groups[name] = found
        return found

    def _describe(self, key: Any, form: Form, args: tuple[Any, ...]) -> tuple[int, Signature]:
        """Send a signature to the monitor; later reports refer to the signature by index."""
        if len(self._signatures) == _MOST_SIGNATURES:
            # Start again at index 0: when an index is reused, the monitor drops all signatures from that index on.
            self._signatures.clear()
        _, places, op, size = key
        found = len(self._signatures), signature_of(form, args, op, _line(places), size)
        self._control.tell("signature", found[0], serialization.encode(found[1].fingerprint.values()))
        self._signatures[key] = found
        return found

    def _compare(self, content: bytes, limit_s: float | None, place: dict[str, Any]) -> None:
        """Wait until all ranks have made the call in `content`, but for at most `limit_s` seconds, if there is a limit.

        Asynchronous calls need a limit, because ranks may legitimately make them in different orders.
        """
        try:
            self._control.compare(content, limit_s)
        except CommError as error:
            if self._control.server_lost:
                return
            self._raised = True
            raise error.locate(**place) from None

    def _explain(self, error: RuntimeError, form: Form, where: _WatchedGroup, number: int) -> None:
        """If another rank's failure caused the error in a call, raise that failure."""
        # A failed monitored barrier closes connections between ranks that are alive, so its error does not mean that a
        # peer was lost.
        if follows(error) and form.operation != "monitored_barrier":
            self._await_cause(error, form.operation)
        if self._cause is not None:
            self._raise(form, where, number, error)

    def _await_cause(self, error: BaseException, operation: str) -> None:
        """Report an error that another rank's failure may have caused, and wait for a report of that failure."""
        message = f"rank {self._group.rank} failed in {operation}: {type(error).__name__}: {text_of(error)}"
        with contextlib.suppress(CommError):
            self._control.report_failure(self._group, Cause("PeerLostError", self._group.rank, message))
            self._reported.wait(_CAUSE_S)

    def _raise(self, form: Form, where: _WatchedGroup, number: int, error: BaseException | None = None) -> NoReturn:
        assert self._cause is not None
        self._raised = True
        raise error_of(self._cause).locate(**self._place(form, where, number)) from error

    def _place(self, form: Form, where: _WatchedGroup, number: int) -> dict[str, Any]:
        return {
            "rank": self._group.rank,
            "size": self._group.size,
            "group": where.text,
            "operation": form.operation,
            "call": number,
        }

    def on_process_exit(self, error: BaseException | None) -> None:
        """If an error ends this process, wait for a report of another rank's failure that may have caused it.

        If ranks' calls differed, and the program ends without another call that could raise the error, the process
        exits with an error status, because the program's result may be wrong.
        """
        with contextlib.suppress(CommError):
            # Calls are compared some time after they were reported.
            if not self._raised and self._control.settle():
                self._reported.wait(_CAUSE_S)
        if error is None and not self._raised and self._cause is not None and self._cause.kind == "MismatchError":
            self._end("has finished")
        self._raised = True
        if error is not None and follows(error):
            self._await_cause(error, "the program")

    # -- failures ------------------------------------------------------------------------------
    def failed(self, cause: Cause) -> None:
        """Handle a failure reported by the monitor: print it, and make sure that this process raises it or exits."""
        if self._control.server_lost:
            _say(f"the watch has ended, and calls are no longer compared: {cause.message}")
            self._groups = dict.fromkeys(self._groups)
            self._reported.set()
            return
        self._cause = cause
        error = error_of(cause, self._group)
        _say(f"{type(error).__name__}: {error}")
        self._reported.set()
        spawn_thread(self._end_soon, "unisono end of a watched rank")

    def _end_soon(self) -> None:
        """Exit unless a thread raises the failure soon: all threads may be blocked in C++, or make no more calls."""
        began = clock.now()
        while not self._raised:
            waited_s = clock.now() - began
            if waited_s > (_BLOCKED_S if self._inside else _BUSY_S):
                self._end("does not return from its call")
            time.sleep(_POLL_S)

    def _end(self, why: str) -> NoReturn:
        _say(f"rank {self._group.rank} {why}; it ends with exit status {EXIT_STATUS}")
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):
                stream.flush()
        os._exit(EXIT_STATUS)


def watch(group: dist.ProcessGroup | None = None, *, check: _Check = "after", timeout: Timeout | None = None) -> Watch:
    """Compare the ranks' calls on torch's own process groups, and report differences. Collective.

    Call this function after `init_process_group`, on every rank of the group. The backend does not change. The watch
    sees calls from Python and from DDP's C++ code, and functional collectives.

    Provisional: it may change in any minor version, without a deprecation.

    Args:
        group: Group whose ranks take part; the default group if None. Every group whose ranks all take part is watched,
            including groups created later.
        check: "after": a separate process compares the calls while they run, so no call waits. If calls differ, each
            rank prints an error and raises it in its next call; a rank that makes no further call exits with status 70.
            "before": a call waits until all ranks have made the same call, and only then runs; an asynchronous call
            waits for at most 0.05 s.
        timeout: Seconds, or a `timedelta`, after which missing ranks are reported; by default nine tenths of each
            group's timeout.

    Returns: A `Watch`; call its `close()` to stop watching.

    Raises:
        ValueError: There is no default group; `check` or `timeout` is invalid; the process is already watched or not in
            the group; or the group's backend cannot be watched.
        CommTimeoutError: Not all ranks of the group called `watch` within a minute.

    Example:
        >>> watched = un.interop.watch()
        Traceback (most recent call last):
        ...
        ValueError: torch has no default group yet: call dist.init_process_group first
    """
    global _watch  # noqa: PLW0603
    if check not in ("after", "before"):
        raise ValueError(f"check must be 'after' or 'before', not {check!r}")
    limit_s = None if timeout is None else positive_timeout(timeout)
    if not dist.is_initialized():
        raise ValueError("torch has no default group yet: call dist.init_process_group first")
    if _watch is not None:
        raise ValueError("this process is watched already; close that watch first")
    chosen: Any = group or dist.group.WORLD
    if why := _why_not(chosen):
        raise ValueError(f"groups of backend {dist.get_backend(chosen)!r} are not watched: {why}")
    ranks = dist.get_process_group_ranks(group)
    if dist.get_rank() not in ranks:
        raise ValueError("this process is not in the group; only its members call watch")
    name = chosen.group_name
    _counted[name] += 1
    store = dist.PrefixStore(f"unisono/watch {_counted[name]} of {name}", dist.distributed_c10d._get_default_store())
    made = _meet(store, ranks.index(dist.get_rank()), ranks, check, limit_s)
    watch_with(_seen)
    _watch_waits()
    _watch = made
    return made


def _why_not(pg: Any) -> str | None:
    """Return why a process group cannot be watched, or None if it can."""
    if type(pg) is not dist.ProcessGroup and dist.get_backend(pg) not in _NOT_WATCHED:
        return "they are implemented in Python, and torch does not call them through its dispatcher"
    return _NOT_WATCHED.get(dist.get_backend(pg))


def _seen(operator: Operator, pg: dist.ProcessGroup, make: Callable[[], Any], args: tuple[Any, ...]) -> Any:
    form = form_of(operator)
    return make() if _watch is None or form is None else _watch.seen(form, pg, make, args)


@cache
def _watch_waits() -> None:
    """Pass all later waits in Python for torch's works to the watch. Idempotent."""
    original = dist.Work.wait

    @wraps(original)
    def wait(work: dist.Work, *args: Any, **keywords: Any) -> bool:
        # A wait that has its own timeout blocks nobody for good.
        limited = bool(args or keywords)
        return original(work, *args, **keywords) if _watch is None or limited else _watch.wait(work, original)

    dist.Work.wait = wait  # type: ignore[method-assign, assignment]


def _meet(store: dist.Store, rank: int, ranks: list[int], check: _Check, limit_s: float | None) -> Watch:
    """Start the monitor on the group's first rank, and connect to it from every rank."""
    size = len(ranks)
    here = host_identity()
    publish(store, f"rank {rank}", here)
    master = os.environ.get("MASTER_ADDR", "192.0.2.1")
    if rank == 0:
        hosts = {read(store, f"rank {r}", _MEET_WITHIN_S, f"rank {r} has not called watch") for r in range(size)}
        secret = secrets.token_bytes(32)
        address = start_monitor("127.0.0.1" if len(hosts) == 1 else address_for_others(master), secret)
        publish(store, "monitor", (*address, secret, f"torch/{secrets.token_hex(4)}", here))
    host, port, secret, name, its = read(store, "monitor", _MEET_WITHIN_S, "rank 0 has not started the watch")
    control = CallControl((in_zone_of(host, master), port), secret, _MEET_WITHIN_S, rank=rank)
    made = Watch(control, Group.world(rank, size, name), ranks, check, limit_s)
    control.attend(Group.world(rank, size, name), made.failed, os.getpid() if its == here else 0)
    # The monitor only notices the loss of ranks that have connected, so all ranks must connect before the first call.
    control.exchange(Group.world(rank, size, name), "watch", check, _MEET_WITHIN_S)
    # Exit handlers run in reverse order: register the watch after the connection, so that the watch closes first.
    close_at_exit(made)
    invalidate_after_fork(made)
    return made


def _line(places: tuple[Place, Place]) -> str | None:
    """Return the source line of a call, and also the user's line if an installed package made the call."""
    place, users = map(site_text, places)
    return place if place == users else f"{place}, called by {users}"


def _timeout_s(pg: dist.ProcessGroup) -> float:
    """Return the timeout of a group."""
    timeout = dist.default_pg_timeout
    with contextlib.suppress(AttributeError, RuntimeError):
        timeout = pg._get_backend(pg._device_types[0]).options._timeout
    return float(timeout.total_seconds())


def _say(text: str) -> None:
    with contextlib.suppress(AttributeError, OSError, ValueError):
        # Use a single write, so that the output of several ranks does not interleave.
        sys.stderr.write(f"unisono watch: {text}\n")
        sys.stderr.flush()


def watch_at_init(setting: str) -> None:
    """Make `init_process_group` call `watch`, as requested by UNISONO_WATCH in the environment.

    Args:
        setting: "after" or "before"; any other value means "after". UNISONO_WATCH_TIMEOUT sets the timeout in seconds.
    """
    check: _Check = "before" if setting == "before" else "after"
    timeout = os.environ.get("UNISONO_WATCH_TIMEOUT")
    original = dist.init_process_group

    @wraps(original)
    def init_process_group(*args: Any, **keywords: Any) -> None:
        original(*args, **keywords)
        if _watch is not None:
            # This watch is left over from a default group that has been destroyed.
            _watch.close()
        if _why_not(dist.group.WORLD) or dist.get_world_size() == 1:
            return
        try:
            watch(check=check, timeout=float(timeout) if timeout else None)
        except (CommError, ValueError, OSError) as error:
            warnings.warn(f"calls are not watched: {error}", RuntimeWarning, stacklevel=2)

    dist.init_process_group = init_process_group
    dist.distributed_c10d.init_process_group = init_process_group
