"""Translation of torch's options: operations, timeouts, blocking or asynchronous."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
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
from unisono.interop.dispatch_modes import modes
from unisono.interop.error_texts import add_torch_words

__all__ = [
    "GroupOptions",
    "UnisonoWork",
    "asynchronous",
    "limit_s",
    "only",
    "operation",
    "plain",
    "together",
    "unversioned",
]

_NAMES: dict[object, str] = {op: name.lower() for name, op in dist.ReduceOp.RedOpType.__members__.items()}


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """Options of one group, given as `pg_options` to `init_process_group` or `new_group`; equal on all ranks.

    Attributes:
        transport: What carries the group: "shm", "tcp", "gloo", or "auto" for shared memory where all its ranks
            are on one host, else tcp, or gloo where a rank has no native core.
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
    """The name of the reduce operation in an options object of torch's, or in a `dist.ReduceOp`; sum by default.

    Raises `ValueError` for PREMUL_SUM, which is NCCL's own.

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
    """Return the timeout of a call in seconds, if its options set one; None for the group's own timeout."""
    timeout = options if isinstance(options, timedelta) else getattr(options, "timeout", None)
    # Torch writes "not set" as a negative time.
    return timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None


def asynchronous(options: Any) -> bool:
    """Return whether a call may return before it is done: True, as torch's C++ code expects, unless disabled."""
    return bool(getattr(options, "asyncOp", True))


def only(tensors: list[torch.Tensor], name: str) -> torch.Tensor:
    """The only tensor of a list; several on one rank were for several devices of one process."""
    if len(tensors) != 1:
        raise ValueError(f"{name} takes one tensor per rank, not {len(tensors)}")
    return unversioned(tensors[0])


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without a gradient history, which torch's own backends ignore.

    Not only for what has one now: torch may give the tensor one before a later call is done, as its functions with
    a derivative do with their outputs. A sparse tensor is itself, for the other one would not be changed with it.
    """
    return tensor.detach() if tensor.layout == torch.strided else tensor


def unversioned(tensor: torch.Tensor) -> torch.Tensor:
    """As `plain`, with a version counter of its own: autograd does not notice what is written.

    Torch's backends write without a trace where they get the tensor itself, and programs rely on that: they reduce an
    activation that autograd has saved. Where torch's gloo copies from a buffer of its own, as to the outputs of
    `all_gather`, autograd notices, so those outputs are `plain`.
    """
    return tensor.data if tensor.layout == torch.strided else tensor


_ALWAYS = timedelta(0)
_KEPT_BYTES = 4096
# Of the process, because torch's C++ code does not say whose works it still holds; bounded.
_dropped: deque[UnisonoWork] = deque(maxlen=1024)


class UnisonoWork(dist.Work):
    """Torch `Work` over a unisono work.

    Torch's C++ code holds only its own part of one that Python hands to it, as `DDP.join` does, and finds methods by
    way of the Python part. So that one is kept when Python has dropped it: the last 1,024 of a process, since nothing
    tells how long C++ holds its part. Long tensors are not kept with it; `DDP.join` asks for one number.

    Args:
        work: What is under way, or None if it is done.
        tensors: What the future holds in the end.
        waits: Whether `get_future` returns when the work is done: C++ code, as DDP's, waits for a future where no
            other simulated rank could go on.
    """

    def __init__(self, work: Work | None, tensors: Sequence[torch.Tensor], *, waits: bool = False) -> None:
        super().__init__()
        self._waits = waits
        self._work = work
        self._tensors = list(tensors)

    def __del__(self) -> None:
        # Sparse tensors have no `nbytes`.
        if sum(tensor.numel() * tensor.element_size() for tensor in self._tensors) > _KEPT_BYTES:
            self._tensors = []
        _dropped.append(self)

    def wait(self, timeout: timedelta = _ALWAYS) -> bool:
        """Return True when it is done, or raise its error. A time of zero, torch's default, is the group's timeout."""
        if self._work is None:
            return True
        limit = timeout.total_seconds() if timeout > _ALWAYS else None
        try:
            if modes():
                # The waiter may run the call: the tensors in it are real under FakeTensorMode, too, and no one else's.
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
        """A future of the tensors. Its error is torch's, with ours as text, so that C++ code sees it as one."""
        if self._waits and self._work is not None:
            with suppress(Exception):
                # The future holds the error.
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
    """Several works as one, which holds the tensors of all of them."""
    group = WorkGroup([work._work for work in works if work._work is not None])
    return UnisonoWork(group, [tensor for work in works for tensor in work.result()])
