"""Replays one rank alone: a recording of the data that its peers sent replaces the peers."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast
from unittest import mock

import torch
import torch.distributed as dist

from unisono.checkpoint.tree import RNG
from unisono.communicator import Communicator
from unisono.control.local import LocalHub
from unisono.core.call import Call
from unisono.core.control import ControlPlane
from unisono.core.failure import Cause
from unisono.core.flight_recorder import Activity, callers_place, site_text
from unisono.core.group import Group
from unisono.core.staging import digest
from unisono.core.step_boundaries import StepBoundaries
from unisono.core.transport import Options, Transport
from unisono.core.types import Message, PointToPoint, Recv, Timeout, Work
from unisono.core.work import ChainedWork, Completion, raised_by
from unisono.errors import CommError, CommTimeoutError, MismatchError, UnavailableError
from unisono.recording.log import Log, LogEntry, error_from, path_of
from unisono.recording.recorder import ATTRIBUTES, ControlReplies, described, key_of

__all__ = ["AloneControl", "RankReplay", "RecordingEndError", "ReplayTransport", "without_torch_groups"]

T = TypeVar("T")

_LATER_S = 0.2


class RecordingEndError(SystemExit):
    """A `SystemExit` with status 0, raised after the last recorded call, so that a script exits without an error."""


class RankReplay:
    """State of a replay: the log, whether the replay has begun, and the results of the comparison.

    Args:
        folder: Folder that was passed to `un.record`.
        rank: The recorded rank's number in the job's initial group.

    Attributes:
        begun: Whether the program has called `un.record`.
        calls, messages: Number of collectives and of messages that matched the recording.
        difference: Description of the first call or message that did not match; None if all matched.
    """

    def __init__(self, folder: str | Path, rank: int) -> None:
        path = path_of(folder, rank)
        if not path.is_file():
            there = sorted(int(each.stem.removeprefix("rank")) for each in Path(folder).glob("rank*.record"))
            raise FileNotFoundError(f"{folder} holds recordings of ranks {there}, and none of rank {rank}")
        self.log: Log = Log(path)
        header = self.log.take(("header",))
        if header is None:
            raise ValueError(f"{path} ends before its header")
        self.header: dict[str, Any] = header.value
        self.begun: bool = False
        self.calls = 0
        self.messages = 0
        self.difference: str | None = None
        self.ended: bool = False

    def report(self) -> dict[str, Any]:
        """Return the results of the comparison, as a dict for JSON."""
        return {
            "rank": self.header["members"][self.header["rank"]],
            "begun": self.begun,
            "calls": self.calls,
            "messages": self.messages,
            "difference": self.difference,
            "end_of_recording": self.ended,
        }

    def differs(self, text: str) -> NoReturn:
        """Raise the error for a call that differs from the recording."""
        if self.difference is None:
            self.difference = text
        raise MismatchError(f"this replay differs from the recording: {text}")

    def missing(self, group: Group, what: str) -> NoReturn:
        """For an unrecorded call, raise `RecordingEndError`, `MismatchError`, or the error of a recorded abort."""
        if not self.log.holds(("call", group.name), ("send", group.name)):
            abort = self.log.peek(("abort", group.name))
            if abort is not None:
                raise error_from(abort.value)
            if self.log.peek(("end",)) is not None:
                self.ended = True
                raise RecordingEndError(0)
        self.differs(f"{what} was not recorded, or had not ended when the recorded process did")

    def reply(self, name: str, alone: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Return the recorded reply to a request to the control plane; if there is none, the reply of `alone`."""
        entry = self.log.take(key_of(name, arguments)) if self.begun else None
        if entry is None:
            return alone(*arguments, **options)
        kind, value = entry.value
        if kind == "raised":
            raise error_from(value)
        return value

    def require_begun(self) -> None:
        """Raise an error for a call before `un.record`."""
        if not self.begun:
            raise CommError("a call before un.record was not recorded. The recorded program had made none there")

    def communicator(self) -> Communicator:
        """Return the rank's communicator, whose peers are replaced by the recording."""
        header = self.header
        backend, device, timeout_s, chunk_bytes, deterministic = header["options"]
        options = Options(backend, device, timeout_s, chunk_bytes=chunk_bytes, deterministic=deterministic)
        group = Group(header["name"], header["rank"], tuple(header["members"]))
        transport = ReplayTransport(self, group)
        control = cast("ControlPlane", ControlReplies(cast("ControlPlane", AloneControl(self)), self.reply))
        return Communicator(transport, control, options, check="auto" if header["checked"] else "off")

    def run(self, program: Callable[..., T], args: Sequence[Any], kwargs: Mapping[str, Any]) -> T | None:
        """Run the program and return its result, or None if the recording ends first."""
        try:
            with without_torch_groups(), self.communicator() as comm:
                result = program(comm, *args, **kwargs)
        except RecordingEndError:
            return None
        if not self.begun:
            raise ValueError("the program has not called un.record, where its recording began")
        return result

    def results(
        self, program: Callable[..., T], args: Sequence[Any], kwargs: Mapping[str, Any], nprocs: int
    ) -> list[T | None]:
        """Return a list of results, as `launch` does; the result is None for every rank except the replayed rank."""
        rank = self.header["members"][self.header["rank"]]
        if rank >= nprocs:
            raise ValueError(f"rank {rank} was recorded, and launch starts {nprocs} ranks")
        found: list[T | None] = [None] * nprocs
        found[rank] = self.run(program, args, kwargs)
        return found

    def begin(self) -> None:
        """Begin the replay at the point where the recording began."""
        if self.begun:
            raise ValueError("un.record was called twice in a replay")
        self.begun = True
        # Restore the number of threads, because the rounding of sums depends on it.
        torch.set_num_threads(self.header["threads"])
        RNG().load_state_dict(self.header["random"])


def _refuse_groups(*_given: Any, **_how: Any) -> NoReturn:
    """Replacement for `dist.init_process_group`, which would wait for ranks that never join."""
    raise UnavailableError(
        "a replay has no other ranks that could join a group of torch.distributed, and calls of such groups are not "
        "recorded. It answers un.init and un.launch: use their communicator, or pass what the program does after "
        "Communicator.from_group to un.replay, as a function"
    )


def without_torch_groups() -> AbstractContextManager[Any]:
    """Return a context in which torch cannot create process groups."""
    return mock.patch.object(dist, "init_process_group", _refuse_groups, create=True)


class ReplayTransport(Transport):
    """Transport without peers, which reads results and messages from the recording, and rejects calls that differ."""

    checks = True

    def __init__(self, replay: RankReplay, group: Group) -> None:
        self.group = group
        self.replay = replay
        self._name = group.name
        self._received = Counter[tuple[int, int]]()
        self._works = 0
        self._futures = _Futures(replay, group.name)
        for name in ATTRIBUTES:
            setattr(self, name, replay.header["attributes"][name])

    def split(self, group: Group) -> ReplayTransport:
        return ReplayTransport(self.replay, group)

    # -- collectives ---------------------------------------------------------------------------
    def supports(self, call: Call) -> bool:
        return call.name in self.native

    def compare(self, call: Call, deadline: float) -> None:
        refused = self.replay.log.take(("refused", self._name, call.fingerprint.call))
        if refused is not None:
            raise error_from(refused.value)

    def run(self, call: Call, over: PointToPoint | None = None) -> Work:
        replay = self.replay
        replay.require_begun()
        number = call.fingerprint.call
        what = f"{call.fingerprint.operation} #{number} of {self.group.text}"
        expected = replay.log.take(("call", self._name, number))
        if expected is None:
            replay.missing(self.group, what)
        difference = _difference(expected.value, described(call))
        if difference:
            replay.differs(f"{what}, {difference}")
        replay.calls += 1
        entry = replay.log.take(("result", self._name, number))
        if entry is None:
            replay.missing(self.group, what)
        if entry.value is not None:
            return Completion.ended(error_from(entry.value))
        entry.copy_to(call.outputs)
        return Completion.ended()

    # -- messages ------------------------------------------------------------------------------
    def post(self, batch: Sequence[Message]) -> Work:
        replay = self.replay
        replay.require_begun()
        arrivals: list[tuple[LogEntry, torch.Tensor]] = []
        for message in batch:
            if isinstance(message, Recv):
                peer = message.peer
                tag = message.tag
                self._received[peer, tag] += 1
                entry = replay.log.take(("recv", self._name, peer, tag, self._received[peer, tag]))
                if entry is None:
                    # The message did not arrive in the recorded run, so the recording contains at most a failed wait
                    # for it.
                    return _Unanswered(partial(replay.missing, self.group, f"the message from rank {peer}"))
                arrivals.append((entry, message.tensor))
            else:
                self._compare_sent(message)
        for entry, tensor in arrivals:
            try:
                entry.copy_to([tensor])
            except ValueError as error:
                replay.differs(f"a receive at {site_text(callers_place())} of {tensor.numel()} elements: {error}")
        replay.messages += len(batch)
        return Completion.ended()

    def _compare_sent(self, message: Message) -> None:
        what = f"a message to rank {message.peer}, tag {message.tag}"
        expected = self.replay.log.take(("send", self._name, message.peer, message.tag))
        if expected is None:
            self.replay.missing(self.group, what)
        *wanted, site = expected.value
        sent = [message.tensor.numel(), str(message.tensor.dtype), digest(message.tensor)]
        if sent[:2] != wanted[:2]:
            kind = "{} elements of {}"
            self.replay.differs(f"{what}: {kind.format(*wanted)} were sent at {site}, and now {kind.format(*sent)}")
        if sent != wanted:
            self.replay.differs(f"{what}: other bytes are sent at {site_text(callers_place())} than at {site}")

    def iprobe(self, peer: int, tag: int) -> bool:
        key = "match", self._name, tag
        found = self.replay.log.peek(key)
        if found is None:
            self.replay.missing(self.group, f"a receive of tag {tag} from any rank")
        if found.value != peer:
            return False
        self.replay.log.take(key)
        return True

    # -- timing that the program can observe ---------------------------------------------------------
    def returned(self, work: Work) -> Work:
        if not self.replay.begun:
            return work
        self._works += 1
        return _ReplayedWork(work, self.replay, self._name, self._works, self._futures)

    def close(self) -> None:
        pass

    def abort(self, cause: BaseException) -> None:
        pass


def _difference(expected: dict[str, Any], found: dict[str, Any]) -> str:
    """Describe how a call differs from the recording; return an empty string if it does not differ."""
    then = expected["site"]
    now = found["site"]
    where = f"at {now}" if then == now else f"at {now} (recorded at {then})"
    for name, value in found.items():
        before = expected[name]
        before = tuple(before) if isinstance(value, tuple) else before
        if name not in ("site", "digests") and value != before:
            return f"{where}: {name} was {before}, and is {value}"
    if found["digests"] != expected["digests"]:
        return f"{where}: this rank sends other bytes. Did it compute with another input, random number or time?"
    return ""


class _Unanswered(Completion):
    """Work that was still running when the recording ended, or that the program never waited for."""

    def __init__(self, missing: Callable[[], NoReturn]) -> None:
        super().__init__(0.0)
        self._missing = missing

    def wait(self, timeout: Timeout | None = None) -> None:
        self._missing()


class _Futures:
    """Completes the futures of `Work` objects in the recorded order."""

    def __init__(self, replay: RankReplay, group: str) -> None:
        self._log = replay.log
        self._key = "settled", group
        self._asked: dict[int, list[Callable[[], object]]] = {}
        self._due: deque[Callable[[], object]] = deque()
        self._lock = threading.RLock()

    def ask(self, number: int, settle: Callable[[], object]) -> None:
        """Complete a work's future, by calling `settle`, as soon as the future is next in the recorded order.

        A program can add callbacks to a future only after receiving it. If a future is next in the order when the
        program requests it, it completes immediately. Futures that waited for it complete a little later, so that the
        program can first add callbacks to it.
        """
        with self._lock:
            self._asked.setdefault(number, []).append(settle)
            waiting = bool(self._due)
            while (following := self._log.peek(self._key)) is not None and self._asked.get(following.value):
                self._due.append(self._asked[following.value].pop(0))
                self._log.take(self._key)
            if waiting or not self._due:
                return
            self._due.popleft()()
            if self._due:
                later = threading.Timer(_LATER_S, self._complete)
                later.daemon = True
                later.start()

    def _complete(self) -> None:
        with self._lock:
            while self._due:
                self._due.popleft()()


class _ReplayedWork(ChainedWork):
    """Work that returns the recorded results."""

    def __init__(self, inner: Work, replay: RankReplay, group: str, number: int, futures: _Futures) -> None:
        super().__init__(inner)
        self._log = replay.log
        self._where = group, number
        self._futures = futures
        self._unfinished = 0

    def wait(self, timeout: Timeout | None = None) -> None:
        failed = self._log.take(("wait", *self._where))
        if failed is not None:
            raise error_from(failed.value)
        self._inner.wait()

    def is_completed(self) -> bool:
        polls = self._log.take(("unfinished", *self._where)) if not self._unfinished else None
        if polls is not None:
            self._unfinished = polls.value
        if self._unfinished:
            self._unfinished -= 1
            return False
        if self._log.peek(("wait", *self._where)) is None:
            with suppress(CommError):
                self._inner.wait()
        return True

    def exception(self) -> BaseException | None:
        failed = self._log.peek(("wait", *self._where))
        return self._inner.exception() if failed is None else error_from(failed.value)

    def get_future(self) -> torch.futures.Future[None]:
        ended = Completion(0.0)
        self._futures.ask(self._where[1], lambda: ended.complete(raised_by(self.wait)))
        return ended.get_future()

    def cancel(self) -> bool:
        entry = self._log.take(("cancelled", *self._where))
        if entry is not None and entry.value:
            self._inner.cancel()
        return entry is not None and bool(entry.value)


class AloneControl:
    """Control plane without peers, which answers requests as if all ranks made the same request."""

    def __init__(self, replay: RankReplay) -> None:
        self._replay = replay
        self._local = LocalHub().control()

    def __getattr__(self, name: str) -> Any:
        # A copy is asked for special methods before it has `_local`.
        if name.startswith("_"):
            raise AttributeError(name)
        # The store, shared objects and the end of a group need no peers, and a group that was never joined has no
        # failure.
        return getattr(self._local, name)

    def get(self, key: str, timeout: float, group: Group | None = None) -> bytes:
        if not self._local.check([key]):
            raise CommTimeoutError(f"key {key!r} was not recorded")
        return self._local.get(key, timeout)

    # -- groups --------------------------------------------------------------------------------
    def join(self, group: Group, on_failure: Callable[[Cause], None] | None = None) -> None:
        pass

    def exchange(self, group: Group, topic: str, value: Any, timeout: float) -> list[Any]:
        return [value] * group.size

    def exchange_unless_equal(self, group: Group, topic: str, value: Any, timeout: float) -> list[Any] | None:
        if topic != "introduction" or self._replay.begun:
            return None
        # Before the replay has begun, answer with the ranks and hosts of the recorded communicator.
        hosts = enumerate(self._replay.header["hosts"])
        names = {rank: f"host {number}" for number, ranks in hosts for rank in ranks}
        return [(names[rank], *value[1:]) for rank in range(group.size)]

    def report_failure(self, group: Group, cause: Cause) -> Cause:
        return cause

    def rebuild(self, group: Group, attempt: int, timeout: float, **how: Any) -> NoReturn:
        self._replay.missing(group, "rebuild")

    def request_admission(self, timeout: float) -> NoReturn:
        raise CommError("a replay admits no newcomers")

    # -- stopping at the same step ---------------------------------------------------------------
    def boundaries(self, group: Group) -> StepBoundaries:
        boundaries = StepBoundaries()
        # The recording does not say when a stop was requested, so act as if one were pending: the first step boundary
        # then reads the recorded decision, if any.
        boundaries.hold("the recorded run stopped here")
        return boundaries

    def request_stop(self, group: Group | None, reason: str) -> int:
        """Do nothing: a replay stops where the recorded run stopped."""
        return 0

    def stop_verdict(self, group: Group, timeout: float) -> None:
        """Return None: no rank has requested a stop."""

    # -- activity ------------------------------------------------------------------------------
    def measured(self, group: Group, what: str, make: Callable[[], T]) -> T:
        # Don't call `make` once the replay has begun, because it may write to a checkpoint that is in use.
        if self._replay.begun:
            self._replay.missing(group, what)
        return make()

    def watch(self, activity: Activity) -> None:
        pass

    def query(self, group: Group | None, patience: float) -> dict[Any, Any]:
        return {}

    def hold(self, reason: str | None) -> None:
        """Do nothing: a replay has no other ranks to stop for a debugger."""
