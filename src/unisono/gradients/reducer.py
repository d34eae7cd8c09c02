"""How a full bucket becomes the mean over all ranks: plainly, or by a codec that sends less."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from unisono.communicator import Communicator
from unisono.errors import CommError
from unisono.gradients.bucket import Bucket

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

    Where the backend goes on by itself, the sum is under way while backward computes the rest; elsewhere the
    reduction is done at once. Contributions are divided on their way into the bucket, which costs nothing
    there, unless a division of the sum is more exact and the reduction can do it.

    Args:
        comm: Used for nothing else at the same time.
        codec: Made anew for each bucket of real numbers; None reduces the gradients as they are.
    """

    def __init__(self, comm: Communicator, codec: Codec | None = None) -> None:
        self._comm, self._codec = comm, codec
        self._codecs: dict[tuple[int, ...], Codec] = {}
        self._background = comm.overlaps and codec is None
        # To divide by a power of two is exact, before the sum and after it.
        exact = comm.size.bit_count() == 1
        self.scale = 1 / comm.size if self._background or (exact and codec is None) else 1.0

    def memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """What the backend reduces best. Collective."""
        if device.type == "cpu":
            return self._comm.empty(numel, dtype)
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
        codec = self.codec_of(bucket)
        if codec is not None:
            codec.average(bucket.flat, self._comm, bucket.shapes)
            self._comm.all_reduce(bucket.words(), "avg")
        elif self._background:
            bucket.work = self._comm.all_reduce(bucket.memory, "sum", async_op=True)
        else:
            self._comm.all_reduce(bucket.memory, "avg" if self.scale == 1.0 else "sum")

    def finish(self, bucket: Bucket) -> None:
        """Return when the bucket holds the means."""
        work, bucket.work = bucket.work, None
        if work is not None:
            work.wait()

    def give_up(self, bucket: Bucket) -> None:
        """Wait for what is under way, whatever comes of it, so that the memory can be used again."""
        try:
            self.finish(bucket)
        except CommError:
            # Who started it is being told of an error already.
            return
