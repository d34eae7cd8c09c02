"""Spans of buckets, for traces and torch's profiler."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from unisono.core.group import Group
from unisono.core.tracing import Event, sink_here, span
from unisono.gradients.bucket import Bucket

__all__ = ["observe_bucket"]


@contextmanager
def observe_bucket(bucket: Bucket, group: Group, names: Sequence[str]) -> Iterator[None]:
    """Record the block as the start of a bucket's reduction, or its wait; report the bucket once it is reduced.

    Args:
        bucket: The block starts its reduction, or waits for it.
        group: Group of the communicator that reduces it.
        names: Names of all parameters of the model.
    """
    nbytes, detail = bucket.memory.nbytes, {"parameters": [names[index] for index in bucket.indices]}
    if bucket.observed_s is None:
        bucket.observed_s = time.perf_counter()
    with span("bucket_wait", f"bucket {bucket.name}", group, nbytes, starts=bucket.work is None):
        yield
    if bucket.work is None:
        start, bucket.observed_s = bucket.observed_s, None
        if (sink := sink_here()) is not None:
            end, world_rank = time.perf_counter(), group.members[group.rank]
            sink(Event("bucket", bucket.name, group.name, group.rank, start, end, nbytes, detail, world_rank))
