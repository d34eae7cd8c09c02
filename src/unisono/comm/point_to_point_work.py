"""Work of point-to-point messages, as returned to the caller."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

import torch

from unisono.comm.engine import Engine
from unisono.core.failure import raise_caused
from unisono.core.flight_recorder import PendingMessage, Place
from unisono.core.staging import Staging
from unisono.core.tracing import profiler, sink_here, span
from unisono.core.types import Timeout, Work
from unisono.core.work import resolve_timeout
from unisono.diagnostics.hang_report import with_hang_report
from unisono.errors import CommError, CommTimeoutError

__all__ = ["PointToPointWork"]


class PointToPointWork(Work):
    """A transport's work, with errors that name their call, and the remaining actions at the end."""

    def __init__(
        self,
        engine: Engine,
        record: tuple[str, None, str, Place],
        awaited: tuple[PendingMessage, ...],
        inner: Work,
        staging: Staging,
    ) -> None:
        self._engine, self._record, self._awaited, self._inner, self._staging = engine, record, awaited, inner, staging
        # Messages are counted by themselves: each rank has its own number of them.
        self._operation, self._number = record[0], engine.activity.messages
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def wait(self, timeout: Timeout | None = None) -> None:
        if timeout is None:
            return self.wait_or_break(None)
        limit = resolve_timeout(timeout)
        with self._seen():
            try:
                self._inner.wait(limit)
            except CommTimeoutError as error:
                # The message may still arrive: a wait with an explicit timeout does not break the communicator.
                raise self._located(with_hang_report(error, self._engine.control, self._engine.group)) from None
            except CommError as error:
                raise_caused(self._failed(error), error)
        self._finish()

    def wait_or_break(self, timeout: Timeout | None) -> None:
        """Wait; any failure, a timeout too, breaks the communicator."""
        with self._seen():
            try:
                self._inner.wait(resolve_timeout(timeout, self._engine.options.timeout_s))
            except BaseException as error:
                raise_caused(self._failed(error), error)
        self._finish()

    @contextmanager
    def _seen(self) -> Iterator[None]:
        """Show to other ranks the messages that this rank waits for."""
        activity = self._engine.activity
        activity.enter(*self._record, self._awaited)
        observed = sink_here() is not None or profiler._is_profiler_enabled
        try:
            with span("wait", self._operation, self._engine.group) if observed else nullcontext():
                yield
        finally:
            activity.leave()

    def is_completed(self) -> bool:
        if not self._inner.is_completed():
            return False
        if self._inner.exception() is None:
            # The next wait reports the error.
            with suppress(CommError):
                self._finish()
        return True

    def exception(self) -> BaseException | None:
        error = self._inner.exception()
        return self._failed(error) if error is not None else self._error

    def get_future(self) -> torch.futures.Future[None]:
        future: torch.futures.Future[None] = torch.futures.Future()

        def settle(inner: torch.futures.Future[None]) -> None:
            try:
                inner.value()
                self._finish()
            except Exception as error:
                future.set_exception(self._failed(error))  # type: ignore[arg-type]
            else:
                future.set_result(None)

        self._inner.get_future().add_done_callback(settle)
        return future

    def source_rank(self) -> int:
        return next((peer for kind, peer, *_ in self._awaited if kind == "recv"), self._inner.source_rank())

    def cancel(self) -> bool:
        return self._inner.cancel()

    def _finish(self) -> None:
        with self._lock, torch.no_grad(), self._staging.entered():
            try:
                self._staging.end()
            except CommError as error:
                # Every later wait must report how this one ended.
                self._staging.after.clear()
                self._error = self._failed(error)
        if self._error is not None:
            raise self._error

    def _failed(self, error: BaseException) -> BaseException:
        return self._engine.report_failure(error, self._operation, self._number)

    def _located(self, error: BaseException) -> BaseException:
        assert isinstance(error, CommError)
        group = self._engine.group
        return error.locate(
            rank=group.rank, size=group.size, group=group.name, operation=self._operation, call=self._number
        )
