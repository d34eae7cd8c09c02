"""Bytes that ranks send for an average by a codec, counted at the sender."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unisono.communicator import Communicator
from unisono.compression import Codec
from unisono.core.transport import Transport
from unisono.core.types import Message, Send, Work
from unisono.testing.buckets import Bucket
from unisono.testing.ranks import run_ranks
from unisono.wrappers.base import Wrapper

__all__ = ["Make", "bytes_sent"]

Make = Callable[[], Codec]
"""Makes a codec; every rank calls it."""


def bytes_sent(make: Make, size: int, bucket: Bucket) -> float:
    """Return the bytes that one rank sends for one average: the mean over ranks, counted at the sender.

    Starts ranks that are threads. They choose algorithms as if only bytes had a cost, as `wire_bytes`
    assumes; the first average, in which ranks agree, is not counted.

    Args:
        make: Makes the codec.
        size: Number of ranks.
        bucket: Shapes, dtype and kind of numbers to average.

    Example:
        >>> bytes_sent(un.compression.fp16, size=2, bucket=Bucket(shapes=[(100,)]))
        200.0
    """
    counters: list[_Counted] = []

    def counted(inner: Transport) -> Transport:
        counters.append(_Counted(inner))
        return counters[-1]

    def program(comm: Communicator) -> int:
        codec = make()
        codec.average(bucket.contribution(comm.rank), comm, bucket.sizes)
        counter = next(counter for counter in counters if counter.rank == comm.rank)
        before = counter.sent
        codec.average(bucket.contribution(comm.rank), comm, bucket.sizes)
        return counter.sent - before

    counts: list[int] = run_ranks(program, size, wrap=counted)
    return sum(counts) / size


class _Counted(Wrapper):
    """Counts the bytes that this rank sends."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.sent, self.latency_s, self.second_per_byte = 0, 0.0, 1.0

    def wrap_child(self, inner: Transport) -> _Counted:
        return _Counted(inner)

    def post(self, batch: Sequence[Message]) -> Work:
        self.sent += sum(message.tensor.nbytes for message in batch if isinstance(message, Send))
        return super().post(batch)
