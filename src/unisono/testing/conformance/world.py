"""Test bed for checks: ranks of one backend that run programs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from unisono.communicator import Communicator
from unisono.core.transport import Transport
from unisono.core.types import Timeout, Work
from unisono.core.work import resolve_timeout
from unisono.errors import CommError, PeerLostError
from unisono.testing.namespaced_ranks import TIMEOUT_S
from unisono.testing.pools import pool

__all__ = [
    "NOTHING",
    "Check",
    "Raised",
    "World",
    "answer",
    "check_loss",
    "error_of",
    "numbers",
    "raised",
    "together",
    "until",
    "wait_all",
]

NOTHING = "nothing was raised"


@dataclass(frozen=True, slots=True)
class World:
    """Up to four ranks of one backend.

    Attributes:
        backend: A transport's name.
        wrap: Function applied to each rank's transport.
        timeout: Timeout of one operation: seconds or a `timedelta`.
        chunk_bytes: Maximum message size in collectives, in bytes; small, so that even short tensors are chunked.
        hosts: Grouping of the four ranks into hosts; all ranks share this host if None.
        device: Device of the tensors, as for `launch`; the backend's default if None.

    Example:
        >>> World("thread").run(lambda comm: comm.rank, size=3)
        [0, 1, 2]
    """

    backend: str = "thread"
    wrap: Callable[[Transport], Transport] | None = None
    timeout: Timeout = TIMEOUT_S
    chunk_bytes: int = 4096
    hosts: tuple[tuple[int, ...], ...] | None = None
    device: str | None = None

    @property
    def soon_s(self) -> float:
        """Time in seconds that is ample for any operation that does not block."""
        return resolve_timeout(self.timeout) / 2

    @property
    def never_s(self) -> float:
        """Timeout, in seconds, for waits that must end earlier: longer than `soon_s`, shorter than the default."""
        return 0.9 * resolve_timeout(self.timeout)

    def run(
        self, fn: Callable[..., Any], *args: Any, size: int = 2, on_failure: Literal["end", "continue"] = "end"
    ) -> list[Any]:
        """Return the results of `fn(comm, *args)`, one per rank, in rank order.

        Args:
            fn, args, on_failure: As in `unisono.testing.RankPool.run`.
            size: Number of ranks, 1 to 4.

        Raises:
            Exception: As `unisono.testing.RankPool.run`.
        """
        ranks = pool(
            self.backend,
            timeout=self.timeout,
            chunk_bytes=self.chunk_bytes,
            device=self.device,
            wrap=self.wrap,
            hosts=self.hosts,
        )
        return ranks.run(fn, *args, size=size, on_failure=on_failure)


Check = Callable[[World], None]
"""Check that raises `AssertionError`, or a rank's error, if it fails."""


def numbers(comm: Communicator, *values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the given numbers as a tensor on the communicator's device."""
    return torch.tensor(values, dtype=dtype, device=comm.device)


def together(comm: Communicator) -> None:
    """Assert that the communicator works, with an all-reduce and a message around the ring."""
    total = numbers(comm, 1.0, comm.rank)
    comm.all_reduce(total)
    assert total.tolist() == [comm.size, comm.size * (comm.size - 1) / 2]
    if comm.size > 1:
        got = numbers(comm, -1)
        behind = (comm.rank - 1) % comm.size
        comm.sendrecv(numbers(comm, comm.rank), (comm.rank + 1) % comm.size, got, behind)
        assert got.item() == behind


def answer(comm: Communicator, *values: float) -> None:
    """Wait for a message from rank 0, then send it each of these numbers as a message."""
    comm.recv(numbers(comm, 0), 0)
    for value in values:
        comm.send(numbers(comm, value), 0)


def wait_all(works: Iterable[Work]) -> None:
    """Wait for operations in the given order."""
    for work in works:
        work.wait()


def until(done: Callable[[], bool], within_s: float) -> None:
    """Assert that an operation completes in time without a call to `wait`."""
    deadline = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < deadline, f"not complete after {within_s} s without a wait"
        time.sleep(0.001)


class Raised(NamedTuple):
    """What a rank tells of an error that a call raised. The error itself may not survive pickling.

    Attributes:
        kinds: Names of the error's class and of its base classes; empty if nothing was raised.
        text: The message.
        peer, waited_s: As in `CommError`.
    """

    kinds: tuple[str, ...] = ()
    text: str = NOTHING
    peer: int | None = None
    waited_s: float | None = None

    @classmethod
    def of(cls, error: BaseException | None) -> Raised:
        """Describe an error, or that there is none."""
        if error is None:
            return cls()
        kinds = tuple(kind.__name__ for kind in type(error).__mro__)
        if isinstance(error, CommError):
            return cls(kinds, str(error), error.peer, error.waited_s)
        return cls(kinds, str(error))

    def __str__(self) -> str:
        return f"{self.kinds[0]}: {self.text}" if self.kinds else self.text


def raised(call: Callable[[], object]) -> Raised:
    """Return what a call raises, but not the `SystemExit` that ends an abandoned rank."""
    try:
        call()
    except Exception as error:
        return Raised.of(error)
    return Raised()


def error_of(call: Callable[[], object], kind: type[Exception]) -> str:
    """Return the message of a call's error, which must be of class `kind`; a `CommError` must also have `rank` set."""
    try:
        call()
    except kind as error:
        unknown = isinstance(error, CommError) and error.rank is None
        return f"{error!r}, which does not know its rank" if unknown else str(error)
    except Exception as error:
        return f"not {kind.__name__} but {error!r}"
    return NOTHING


def check_loss(world: World, wait: Callable[[Communicator], object]) -> None:
    """Assert that a wait for a rank that fails with its own error soon raises a `PeerLostError` on the other ranks.

    Args:
        world: The ranks.
        wait: Function that waits for rank 1, for less than the default timeout.
    """

    def program(comm: Communicator) -> object:
        if comm.rank == 1:
            raise KeyError("my own mistake")
        return wait(comm)

    # Restart ranks killed by an earlier failure, so that the measured time excludes their start.
    world.run(together, size=3)
    started = time.monotonic()
    ends = world.run(program, size=3, on_failure="continue")
    assert time.monotonic() - started < world.soon_s, "the other ranks were notified late"
    assert isinstance(ends[1], KeyError), ends
    for end in (ends[0], ends[2]):
        assert isinstance(end, PeerLostError), ends
        assert end.peer == 1, f"{end!r} names rank {end.peer}"
        assert "my own mistake" in str(end), end
