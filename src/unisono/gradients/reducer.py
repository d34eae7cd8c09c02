"""How a full bucket becomes the mean over all ranks: plainly, or by a codec that sends less."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from unisono.communicator import Communicator
from unisono.errors import AbortedError, CommError
from unisono.gradients.bucket import Bucket
from unisono.reduction import HALVES

if TYPE_CHECKING:
    from unisono.compression.codec import Codec

__all__ = ["Reducer", "codec_for"]


def codec_for(compression: str | Codec | Callable[[], Codec] | None) -> Codec | None:
    """What users say for a codec, made into one."""
    if compression is None:
        return None
    from unisono import compression as codecs

    return codecs.resolve(compression)


class Reducer:
    """Starts and finishes the reduction of buckets, in the same order on all ranks.

    Where the backend goes on by itself, the sum is under way while backward computes the rest, and contributions
    are divided on their way into the bucket. Elsewhere the reduction is done at once, and divides the sum, which is
    more exact and touches less memory.

    Args:
        comm: Used for nothing else at the same time.
        codec: Made anew for each bucket of real numbers; None reduces the gradients as they are.

    Attributes:
        comm: Another one takes its place where a failed pass has aborted it.
        background: Whether a bucket travels while others fill.
    """

    def __init__(self, comm: Communicator, codec: Codec | None = None) -> None:
        self.comm, self._codec = comm, codec
        self._codecs: dict[tuple[int, ...], Codec] = {}
        self.background = comm.overlaps and codec is None

    def scale(self, dtype: torch.dtype) -> float:
        """What each contribution is multiplied by on its way into a bucket of this dtype."""
        # An average of halves divides them first, to which a power of two is exact: then it is cheaper here.
        first = dtype in HALVES and self._codec is None and self.comm.size.bit_count() == 1
        return 1 / self.comm.size if self.background or first else 1.0

    def memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """What the backend reduces best. Collective."""
        if device.type == "cpu":
            # Where a failed pass has aborted it, plain memory serves until another one takes its place.
            with suppress(AbortedError):
                return self.comm.empty(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=device)

    def codec_of(self, bucket: Bucket) -> Codec | None:
        """The bucket's own codec, if it has one."""
        if self._codec is None or not bucket.flat.is_floating_point():
            return None
        found = self._codecs.get(bucket.indices)
        if found is None:
            found = self._codecs[bucket.indices] = self._codec.spawn()
        return found

    def start(self, bucket: Bucket) -> None:
        """Begin; the bucket's memory belongs to this until `finish`."""
        codec = None if self._codec is None else self.codec_of(bucket)
        with bucket.about:
            if self.background:
                bucket.work = self.comm.all_reduce(bucket.memory, "sum", async_op=True)
            elif codec is None:
                self.comm.all_reduce(bucket.memory, "avg" if bucket.scale == 1.0 else "sum")
                bucket.found = bucket.present()
            else:
                self.comm.all_reduce(bucket.words(), "avg")
                bucket.found = bucket.present()
                codec.average_used(bucket.flat, self.comm, bucket.shapes, [had for had, _ in bucket.found])

    def finish(self, bucket: Bucket) -> None:
        """Return when the bucket holds the means."""
        work, bucket.work = bucket.work, None
        if work is not None:
            with bucket.about:
                work.wait()

    def give_up(self, bucket: Bucket) -> None:
        """Wait for what is under way, whatever comes of it, so that the memory can be used again."""
        try:
            self.finish(bucket)
        except CommError:
            # Who started it is being told of an error already.
            return
