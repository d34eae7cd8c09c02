"""Coordinates ranks that save or load together: phases succeed on all ranks or on none; background saves queue up."""

from __future__ import annotations

import atexit
import json
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from unisono.checkpoint.errors import (
    CheckpointError,
    CorruptError,
    FormatError,
    NoCheckpointError,
    StateError,
    StorageError,
)
from unisono.comm.equal_tensors import odd_ranks, ranks_text, sides_of
from unisono.control.process_exit import BACKGROUND_SAVES
from unisono.core.types import Timeout
from unisono.core.work import resolve_timeout
from unisono.errors import AbortedError, CommError, CommTimeoutError, MismatchError, PeerLostError

if TYPE_CHECKING:
    from unisono.communicator import Communicator

__all__ = ["CollectiveScope", "SaveHandle", "SaveQueue", "begin", "finish_earlier", "raise_failed"]

_log = logging.getLogger("unisono.checkpoint")

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        CheckpointError,
        CorruptError,
        FormatError,
        NoCheckpointError,
        StateError,
        StorageError,
        MismatchError,
        TypeError,
        ValueError,
    )
}


class CollectiveScope:
    """The ranks that save or load together; only this process if there is no communicator.

    Args:
        comm: Communicator of the ranks that save or load; None for this process alone.
        operation: Name of the operation in messages, such as "save".
        path: The checkpoint's path.
        timeout: Limit on the wait for the slowest rank in each phase; the communicator's timeout if None.
    """

    def __init__(
        self, comm: Communicator | None, operation: str, path: str | None = None, timeout: Timeout | None = None
    ) -> None:
        self.comm = comm
        self._operation = operation
        self._path = path
        self._timeout = timeout
        self.rank: int = 0 if comm is None else comm.rank
        self.size: int = 1 if comm is None else comm.size

    def measured(self, make: Callable[[], Any]) -> Any:
        """Return the result of `make`; a replay returns the recorded result instead (see `ControlPlane.measured`)."""
        return make() if self.comm is None else self.comm._engine.measured(f"a step of a {self._operation}", make)

    def all_or_none(self, step: Callable[[], Any], *, stores: bool = False) -> list[Any]:
        """Run `step` on each rank, and return all ranks' results, which are JSON values. Collective.

        Args:
            step: Function to run.
            stores: Whether `step` writes to the storage or lists its contents; if so, a replay uses the recorded result
                instead of running `step` again.

        Raises:
            CheckpointError, MismatchError, TypeError, ValueError: `step` raised an error on some rank; every rank
                raises an error that names the first rank on which `step` failed.
        """
        failed: Exception | None = None

        def outcome() -> tuple[Any, Any]:
            nonlocal failed
            try:
                return step(), None
            except CommError as error:
                if not isinstance(error, (CheckpointError, MismatchError)):
                    raise
                failed = error
            except Exception as error:
                # Catch every error, because it must be reported to the other ranks.
                failed = error
            return None, self._error_report(failed)

        if self.comm is None:
            value, _ = outcome()
            if failed is not None:
                raise self._own(failed) from failed.__cause__
            return [value]
        mine = self.measured(lambda: json.dumps(outcome())) if stores else json.dumps(outcome())
        texts = self.comm.all_gather_object(mine, timeout=self._timeout)
        values, reports = zip(*map(json.loads, texts), strict=True)
        if not any(reports):
            return list(values)
        bad = next(rank for rank, report in enumerate(reports) if report)
        if bad == self.rank and failed is not None:
            raise self._own(failed) from failed.__cause__
        raise self._error_from(reports[bad], bad)

    def first(self, step: Callable[[], Any], *, stores: bool = False) -> Any:
        """Run `step` on rank 0 only, and return its result on every rank. Collective."""
        return self.all_or_none(step if self.rank == 0 else lambda: None, stores=stores)[0]

    def compare(self, digests: Sequence[str], describe: Callable[[], dict[str, Any]], advice: str) -> None:
        """Raise `MismatchError` on every rank unless all digests are equal. Collective.

        If all digests are equal, nothing is sent.

        Args:
            digests: Digests of all ranks, already exchanged.
            describe: Function that returns a dict from names to digests or values; ranks exchange these dicts to find
                the difference.
            advice: How to resolve the difference, for the message.
        """
        if self.comm is None or len(set(digests)) == 1:
            return
        found = self.comm.all_gather_object(describe(), timeout=self._timeout)
        names = dict.fromkeys(name for one in found for name in one)
        wrong = {name: s for name in names if (s := _with_values([one.get(name, "(absent)") for one in found]))}
        listed = [f"{name!r}: {side}" for name, side in list(wrong.items())[:4]]
        more = f"; and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise MismatchError(
            f"the state differs between ranks: {'; '.join(listed) or 'which dict holds what'}{more}. {advice}",
            rank=self.rank,
            size=self.size,
            operation=self._operation,
        )

    def _error_report(self, error: Exception) -> dict[str, Any]:
        own = self._own(error)
        text = own.message if isinstance(own, CommError) else str(own)
        return {"kind": type(own).__name__, "said": text, "tensors": list(getattr(own, "tensors", ()))}

    def _error_from(self, report: dict[str, Any], rank: int) -> Exception:
        kind = _KINDS.get(report["kind"], CheckpointError)
        if not issubclass(kind, CommError):
            return kind(f"rank {rank} of {self.size}: {report['said']}")
        known: dict[str, Any] = {"rank": rank, "size": self.size, "operation": self._operation}
        if issubclass(kind, CheckpointError):
            known |= {"path": self._path, "tensors": report["tensors"]}
        return kind(report["said"], **known)

    def _own(self, error: Exception) -> Exception:
        """Convert this rank's error to one of the package's error classes."""
        known: dict[str, Any] = {} if self.comm is None else {"rank": self.rank, "size": self.size}
        known["operation"] = self._operation
        if isinstance(error, CommError):
            error.locate(**known)
            if isinstance(error, CheckpointError) and error.path is None:
                error.path = self._path
            return error
        if type(error) in (TypeError, ValueError):
            return error
        if isinstance(error, OSError):
            made: CheckpointError = StorageError(_reason(error), path=self._path, **known)
        else:
            made = CheckpointError(f"{type(error).__name__}: {error}", path=self._path, **known)
        made.__cause__ = error
        return made


def _reason(error: OSError) -> str:
    where = f": {error.filename}" if error.filename else ""
    return f"{error.strerror or error}{where}"


def _with_values(values: Sequence[Any]) -> str | None:
    """Return, as text, the ranks that differ from the majority, and up to three values; None if all are equal."""
    odd = odd_ranks(values)
    listed = [f"{str(value)[:50]} on {ranks_text(ranks)}" for value, ranks in list(sides_of(values).items())[:3]]
    return odd and f"{odd} ({'; '.join(listed)})"


# Saves in progress, and failed saves whose error no caller has seen yet.
_open: set[SaveHandle] = set()


class SaveHandle:
    """A save in progress, returned by `async_save`.

    Args:
        path: The checkpoint's path, for messages.
        work: Function that saves, called in a thread that starts immediately.

    Attributes:
        path: The checkpoint's path.

    Example:
        >>> import tempfile
        >>> saving = un.checkpoint.async_save(tempfile.mkdtemp(), {"w": torch.ones(3)})
        >>> saving.wait()
        >>> saving.done(), saving.exception()
        (True, None)
    """

    def __init__(self, path: str, work: Callable[[], None]) -> None:
        self.path = path
        self._error: BaseException | None = None
        _open.add(self)
        # The thread, not this object, holds `work`, because `work` keeps the copy of the state in memory.
        self._thread = threading.Thread(target=self._run, args=(work,), name=f"unisono save {path}")
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
            _open.discard(self)
        except BaseException as error:
            self._error = error
            _log.error("saving %s failed: %s", self.path, error)

    def wait(self, timeout: Timeout | None = None) -> None:
        """Wait until the checkpoint is published on all ranks; if the save failed, raise its error.

        Args:
            timeout: Seconds or a `timedelta`; None for no limit.

        Raises:
            CheckpointError, MismatchError, TypeError: As for `save`.
            CommTimeoutError: The save is still in progress.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error

    def _join(self) -> BaseException | None:
        """Wait for the save, and return its error without marking the error as seen by a caller."""
        self._thread.join()
        return self._error

    def _unseen(self) -> BaseException | None:
        """Wait, and return the error if no caller has seen it; None if a lost rank or `abort` caused the error."""
        error = self._join()
        is_seen = self not in _open
        _open.discard(self)
        return None if is_seen or isinstance(error, PeerLostError | AbortedError) else error

    def done(self) -> bool:
        """Return whether the save has ended, with or without an error."""
        return not self._thread.is_alive()

    def exception(self, timeout: Timeout | None = None) -> BaseException | None:
        """Wait as `wait` does, but return the save's error instead of raising it.

        Args:
            timeout: As for `wait`.

        Returns:
            The error; None if the checkpoint is published.

        Raises:
            CommTimeoutError: The save is still in progress.
        """
        limit = None if timeout is None else resolve_timeout(timeout)
        self._thread.join(limit)
        if self._thread.is_alive():
            raise CommTimeoutError(f"the save of {self.path} is still running after {limit:g} s", waited_s=limit)
        _open.discard(self)
        return self._error


class SaveQueue:
    """The saves of one communicator, which run one after another on a duplicate of the communicator."""

    def __init__(self, comm: Communicator) -> None:
        self.background_comm: Communicator = comm.dup()
        self.background_comm.allow_any_thread()
        self.last: SaveHandle | None = None
        comm.before_close(self.finish)

    def finish(self) -> None:
        """Wait for the last save before the communicator closes; raise the save's error if no caller has seen it."""
        if self.last is not None and (error := self.last._unseen()) is not None:
            raise error


# The save queue of each communicator; not an attribute of `Communicator`, because that class must not depend on
# checkpoints.
_queues: weakref.WeakKeyDictionary[Communicator, SaveQueue] = weakref.WeakKeyDictionary()
# The last save to each path, for saves without a communicator. The next save to the same path waits for it. Weak,
# because a save that the next one must wait for, or whose error it must raise, is in `_open`.
_alone: weakref.WeakValueDictionary[str, SaveHandle] = weakref.WeakValueDictionary()


def finish_earlier(path: str, comm: Communicator | None, *, raises: bool = True) -> None:
    """Wait for the save in progress on `comm` (or to `path` if `comm` is None); raise its error if no caller saw it."""
    queue = _queues.get(comm) if comm is not None else None
    earlier = queue.last if queue is not None else _alone.get(path) if comm is None else None
    if earlier is None:
        return
    error = earlier._join()
    if comm is not None and not isinstance(error, CheckpointError | MismatchError | TypeError | ValueError | None):
        _queues.pop(comm, None)
    if raises and (unseen := earlier._unseen()) is not None:
        raise unseen


@atexit.register
def raise_failed() -> None:
    """Wait for all saves of this process; raise the first error that no caller saw, which Python prints at exit."""
    for saving in [*_open]:
        if (error := saving._unseen()) is not None:
            raise error


# Launchers call this function when a rank's program has returned, before they report success.
BACKGROUND_SAVES.append(raise_failed)


def begin(path: str, comm: Communicator | None, work: Callable[[Communicator | None], None]) -> SaveHandle:
    """Start `work` in a thread, with a duplicate of `comm`; the first call with each `comm` is collective."""
    if comm is None:
        _alone[path] = saving = SaveHandle(path, lambda: work(None))
        return saving
    if comm not in _queues:
        _queues[comm] = SaveQueue(comm)
    queue = _queues[comm]
    queue.last = SaveHandle(path, lambda: work(queue.background_comm))
    return queue.last
