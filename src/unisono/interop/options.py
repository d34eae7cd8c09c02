"""Conversion of torch's options: reduce operations, timeouts, and blocking or asynchronous mode."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from unisono.core.types import Work
from unisono.core.work import WorkGroup
from unisono.errors import CommError
from unisono.interop.error_texts import add_torch_words

__all__ = [
    "GroupOptions",
    "UnisonoWork",
    "asynchronous",
    "limit_s",
    "modes",
    "only",
    "operation",
    "plain",
    "together",
    "unversioned",
]

modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_NAMES: dict[object, str] = {op: name.lower() for name, op in dist.ReduceOp.RedOpType.__members__.items()}


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """Options of a group, passed as `pg_options` to `init_process_group` or `new_group`. Must be equal on all ranks.

    Attributes:
        transport: "shm", "tcp", "gloo" or "auto". "auto" chooses gloo if a rank has no native core, or if ranks have
            different builds of it; otherwise shared memory if all ranks are on one host and can use it, else tcp.
        check: As for `unisono.init`.
        chunk_bytes: As for `unisono.init`.

    Example:
        >>> GroupOptions(transport="gloo").check
        'auto'
    """

    transport: str = "auto"
    check: Literal["auto", "full", "off"] = "auto"
    chunk_bytes: int = 2 << 20


def operation(options: Any) -> str:
    """Return the name of the reduce operation in torch's options object or `dist.ReduceOp`; sum by default.

    Raises `ValueError` for PREMUL_SUM, which only NCCL supports.

    Example:
        >>> operation(torch.distributed.ReduceOp.MAX)
        'max'
    """
    op = getattr(options, "reduceOp", options)
    if op is None:
        return "sum"
    name = _NAMES[getattr(op, "op", op)]
    if name == "premul_sum":
        raise ValueError("backend 'unisono' has no PREMUL_SUM; multiply the tensor yourself, and use SUM")
    return name


def limit_s(options: Any) -> float | None:
    """Return the timeout in a call's options in seconds, or None if the group's timeout applies."""
    timeout = options if isinstance(options, timedelta) else getattr(options, "timeout", None)
    # Torch represents "not set" as a negative time.
    return timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None


def asynchronous(options: Any) -> bool:
    """Return whether a call may return before its work is done; True by default, as torch's C++ code expects."""
    return bool(getattr(options, "asyncOp", True))


def only(tensors: list[torch.Tensor], name: str) -> torch.Tensor:
    """Return the only tensor in a list. Early versions of torch passed one tensor per device of the process."""
    if len(tensors) != 1:
        raise ValueError(f"{name} takes one tensor per rank, not {len(tensors)}")
    return unversioned(tensors[0])


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the tensor without gradient history. Torch's own backends also ignore gradient history.

    A tensor without gradient history also needs a view, because torch may add a history while the call is in flight, as
    differentiable functions do with their outputs. A sparse tensor is returned unchanged, because a detached copy would
    not see later changes to it.
    """
    return tensor.detach() if tensor.layout == torch.strided else tensor


def unversioned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view as `plain` does, but with a separate version counter, so that autograd does not notice writes.

    When torch's backends write into the caller's tensor, autograd does not notice, and programs rely on that when they
    reduce an activation that autograd has saved. When torch's gloo copies results from its own buffer, as for the
    outputs of `all_gather`, autograd does notice; for such calls, outputs are passed through `plain` instead.
    """
    return tensor.data if tensor.layout == torch.strided else tensor


_ALWAYS = timedelta(0)
_KEPT_BYTES = 4096
# `UnisonoWork` objects that are kept alive. The deque is global and bounded, because there is no way to know which
# objects torch's C++ code still refers to.
_dropped: deque[UnisonoWork] = deque(maxlen=1024)


class UnisonoWork(dist.Work):
    """Torch `Work` that wraps a unisono work.

    A torch `Work` consists of a C++ object and a Python object. When Python passes it to torch's C++ code, as
    `DDP.join` does, C++ refers only to the C++ object, but looks up methods on the Python object. The last 1,024 Python
    objects per process are therefore kept alive, because there is no way to know how long C++ needs them. To save
    memory, these objects drop large tensors; `DDP.join` does not need them, because it reduces a single number.

    Args:
        work: The operation in flight, or None if the operation is done.
        tensors: The future's result.
        waits: Whether `get_future` waits for the work. If it returned early, C++ code such as DDP's would wait for the
            future, and that would block all other simulated ranks.
    """

    def __init__(self, work: Work | None, tensors: Sequence[torch.Tensor], *, waits: bool = False) -> None:
        super().__init__()
        self._waits = waits
        self._work = work
        self._tensors = list(tensors)

    def __del__(self) -> None:
        # Don't use `nbytes`, which sparse tensors do not have.
        if sum(tensor.numel() * tensor.element_size() for tensor in self._tensors) > _KEPT_BYTES:
            self._tensors = []
        _dropped.append(self)

    def wait(self, timeout: timedelta = _ALWAYS) -> bool:
        """Return True when the work is done, or raise its error. A timeout of zero means the group's timeout."""
        if self._work is None:
            return True
        limit = timeout.total_seconds() if timeout > _ALWAYS else None
        try:
            if modes():
                # Disable all modes, because `wait` may run the queued call, whose tensors are real even under
                # FakeTensorMode.
                with _disable_current_modes():
                    self._work.wait(limit)
            else:
                self._work.wait(limit)
        except CommError as error:
            add_torch_words(error)
            raise
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        error = None if self._work is None else self._work.exception()
        if isinstance(error, CommError):
            add_torch_words(error)
        return error

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def source_rank(self) -> int:
        return -1 if self._work is None else self._work.source_rank()

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of the tensors. Torch keeps an error's text but changes its class to one that C++ handles."""
        if self._waits and self._work is not None:
            with suppress(Exception):
                # Ignore the error here, because the future will raise it.
                self._work.wait()
        if self._work is None:
            done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
            done.set_result(self._tensors)
            return done
        return self._work.get_future().then(self._outcome)

    def _outcome(self, _ended: object) -> list[torch.Tensor]:
        error = self.exception()
        if error is not None:
            raise error
        return self._tensors


def together(works: Sequence[UnisonoWork]) -> UnisonoWork:
    """Return one work that completes when all given works have completed, with the tensors of all of them."""
    group = WorkGroup([work._work for work in works if work._work is not None])
    return UnisonoWork(group, [tensor for work in works for tensor in work.result()])
