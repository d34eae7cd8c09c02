"""Conformance checks for codecs: plain functions that raise `AssertionError` on a violation.

`check_codec` starts ranks and runs all checks. A check that takes a communicator must be called on each of its ranks.

    >>> def program(comm):
    ...     for check in (check_average, check_state, check_nonfinite, check_input, check_mismatch):
    ...         check(un.compression.int8, comm, Bucket(shapes=[(3, 4), (5,)]))
    >>> un.launch(program, 2, "thread")
    [None, None]
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from unisono.communicator import Communicator
from unisono.compression import Codec, error_feedback
from unisono.core.transport import Transport
from unisono.core.types import Message, Send, Work
from unisono.errors import MismatchError
from unisono.testing.namespaced_ranks import run_ranks
from unisono.wrappers.base import Wrapper

__all__ = [
    "NUMBERS",
    "Bucket",
    "Make",
    "bytes_sent",
    "check_average",
    "check_bytes",
    "check_codec",
    "check_feedback",
    "check_input",
    "check_mismatch",
    "check_nonfinite",
    "check_state",
]


def check_codec(make: Make, size: int, bucket: Bucket) -> None:
    """Run all of the checks below except `check_feedback`, on thread ranks.

    Args:
        make: Function that makes the codec.
        size: Number of ranks.
        bucket: Shapes, dtype and kind of numbers to check with.

    Raises: AssertionError at the first violation.

    Example:
        >>> check_codec(un.compression.int8, size=2, bucket=Bucket(shapes=[(3, 4), (5,)]))
    """

    def program(comm: Communicator) -> None:
        for check in (check_average, check_state, check_nonfinite, check_input, check_mismatch):
            check(make, comm, bucket)

    run_ranks(program, size)
    check_bytes(make, size, bucket)


def check_average(make: Make, comm: Communicator, bucket: Bucket) -> None:
    """Check that all ranks get the same average, and that it is the mean of the `kept` tensors.

    Each `kept` tensor must be within `error_bound` of its rank's input.

    Args:
        make, bucket: As in `check_codec`.
        comm: Communicator of the averaging ranks, all of which call this check.

    Raises: AssertionError otherwise.
    """
    given = bucket.contributions(comm.size)
    mine = given[comm.rank].clone()
    kept = torch.full_like(mine, torch.nan)
    codec = make()
    codec.average(mine, comm, bucket.sizes, kept)
    others = [tensor for rank, tensor in enumerate(given) if rank != comm.rank]
    bound = codec.error_bound(given[comm.rank], others, bucket.sizes)
    _check_alike(mine, comm, "the result")
    silent = given[comm.rank].clone()
    make().average(silent, comm, bucket.sizes)
    assert _same(silent, mine), "the result differs if no caller passes kept"
    if not math.isfinite(bound):
        return
    everyones = [torch.empty_like(kept) for _ in range(comm.size)]
    comm.all_gather(everyones, kept)
    if not bucket.numel:
        return
    info = torch.finfo(bucket.dtype)
    smallest = info.smallest_normal * info.eps
    kept_mean = torch.stack(everyones).double().mean(0)
    largest = max(float(tensor.abs().max()) for tensor in everyones)
    away = float((kept_mean - mine.double()).abs().max())
    allowed = 16 * info.eps * largest + 4 * comm.size * smallest
    assert away <= allowed, f"the result is {away:.3g} away from the mean of what was kept; {allowed:.3g} is rounding"
    x = given[comm.rank].double()
    k = kept.double()
    lost = float((x - k).norm())
    rounding = 2 * info.eps * float(x.norm() + k.norm()) + math.sqrt(bucket.numel) * comm.size * smallest
    assert lost <= bound * (1 + 1e-6) + rounding, f"{lost:.6g} was lost, more than the declared {bound:.6g}"
    if bucket.numbers == "zero":
        assert not mine.any(), "the average of zeros is not zero"


def check_state(make: Make, comm: Communicator, bucket: Bucket) -> None:
    """Check that a codec continues from a loaded state like the codec that saved it, and that a clone starts fresh.

    Args:
        make, comm, bucket: As in `check_average`.

    Raises: AssertionError otherwise.
    """
    fresh = make()
    codec = make()
    steps = [replace(bucket, seed=bucket.seed + step).contribution(comm.rank) for step in range(4)]
    before = [_averaged(codec, step, comm, bucket) for step in steps[:2]]
    state = codec.state_dict()
    after = [_averaged(codec, step, comm, bucket) for step in steps[2:]]
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    # With `weights_only`, the state may contain only tensors, numbers, strings and containers.
    fresh.load_state_dict(torch.load(file, weights_only=True))
    for expected, step in zip(after, steps[2:], strict=True):
        assert _same(_averaged(fresh, step, comm, bucket), expected), "it does not continue from its loaded state"
    spawned = codec.clone()
    for expected, step in zip(before, steps[:2], strict=True):
        assert _same(_averaged(spawned, step, comm, bucket), expected), "a spawned codec does not start fresh"
    with _raising(ValueError, otherwise="a state of another kind was loaded without an error"):
        make().load_state_dict({"no such": 1})


def check_nonfinite(make: Make, comm: Communicator, bucket: Bucket) -> None:
    """Check that one rank's NaN or infinity appears at the same index on all ranks, but not in the next average.

    Args:
        make, comm, bucket: As in `check_average`.

    Raises: AssertionError otherwise.
    """
    if not bucket.numel:
        return
    place = bucket.seed % bucket.numel
    for bad in (torch.nan, torch.inf, -torch.inf):
        codec = make()
        mine = bucket.contribution(comm.rank)
        if comm.rank == comm.size - 1:
            mine[place] = bad
        codec.average(mine, comm, bucket.sizes)
        assert not mine[place].isfinite(), f"a {bad} of one rank has become {mine[place]}"
        _check_alike(mine, comm, "the result with a NaN")
        after = replace(bucket, numbers="constant").contribution(comm.rank)
        codec.average(after, comm, bucket.sizes)
        assert after.isfinite().all(), f"a {bad} in one step spoils the next"


def check_input(make: Make, comm: Communicator, bucket: Bucket) -> None:
    """Check that invalid buckets raise an error before anything is sent, and that the codec remains usable.

    Args:
        make, comm, bucket: As in `check_average`.

    Raises: AssertionError otherwise.
    """
    codec = make()
    sizes = bucket.sizes
    good = bucket.contribution(comm.rank)
    wrong: list[tuple[torch.Tensor, list[torch.Size], torch.Tensor | None]] = [
        (good.to(torch.int32), sizes, None),
        (good.unsqueeze(0), sizes, None),
        (good, [*sizes, torch.Size([1])], None),
        (good, sizes, torch.cat((good, good.new_zeros(1)))),
        (good, sizes, good.to(torch.float64 if good.dtype != torch.float64 else torch.float32)),
        (good.clone().requires_grad_(), sizes, None),
    ]
    if bucket.numel:
        wrong.append((good, sizes, good))
    if bucket.numel > 1:
        wrong.append((torch.stack((good, good), dim=1)[:, 0], sizes, None))
    for flat, shapes, kept in wrong:
        taken = f"took {flat}, kept={kept}, for a bucket of {shapes} without an error"
        with _raising(TypeError, ValueError, otherwise=taken):
            codec.average(flat, comm, shapes, kept)
    _averaged(codec, good, comm, bucket)


def check_mismatch(make: Make, comm: Communicator, bucket: Bucket) -> None:
    """Check that all ranks get a `MismatchError` if their buckets differ.

    Args:
        make, comm, bucket: As in `check_average`.

    Raises: AssertionError otherwise.
    """
    if comm.size == 1:
        return
    for shapes in ([*bucket.shapes, (1,)], [*bucket.shapes, (0,)]):
        other = replace(bucket, shapes=shapes) if comm.rank == comm.size - 1 else bucket
        unnoticed = f"no rank noticed that a rank has one more parameter, of shape {shapes[-1]}"
        with _raising(MismatchError, otherwise=unnoticed):
            _averaged(make(), other.contribution(comm.rank), comm, other)


def check_feedback(make: Make, comm: Communicator, bucket: Bucket, steps: int = 256) -> None:
    """Check that error feedback keeps the sum of results near the sum of means, after any number of steps. Collective.

    Args:
        make: Function that makes the codec, possibly with feedback already included.
        comm: Communicator of the averaging ranks.
        bucket: Contributions, the same in each step; preferably float64, so that rounding is negligible.
        steps: Number of steps; should be several times as many as the codec needs to send every element once.

    Raises: AssertionError otherwise.

    Example:
        >>> bucket = Bucket(shapes=[(40,)], dtype=torch.float64)
        >>> _ = un.launch(lambda comm: check_feedback(un.compression.int8, comm, bucket, steps=20), 2, "thread")
    """
    codec = make()
    if codec.name != error_feedback.name:
        codec = error_feedback(codec)
    mine = bucket.contribution(comm.rank)
    mean = torch.stack(bucket.contributions(comm.size)).double().mean(0)
    total = torch.zeros_like(mean)
    errors = []
    for step in range(1, steps + 1):
        total += _averaged(codec, mine, comm, bucket)
        errors.append(float((total - step * mean).norm()))
    early = max(errors[: steps // 2])
    late = max(errors[steps // 2 :])
    allowed = 1.5 * early + 1e-9 * float(mean.norm())
    assert late <= allowed, f"the error grows: up to {early:.3g} in the first {steps // 2} steps, then to {late:.3g}"
    assert errors[-1] <= steps * float(mean.norm()) / 4, f"after {steps} steps {errors[-1]:.3g} is missing"


def check_bytes(make: Make, size: int, bucket: Bucket) -> None:
    """Check that `wire_bytes` is within 2 % of the bytes sent. The check starts its own ranks, like `bytes_sent`.

    Args:
        make, size, bucket: As in `check_codec`.

    Raises: AssertionError otherwise.

    Example:
        >>> check_bytes(un.compression.int8, size=2, bucket=Bucket(shapes=[(3, 4), (5,)]))
    """
    sent = bytes_sent(make, size, bucket)
    predicted = make().wire_bytes(bucket.numel, bucket.sizes, size, bucket.dtype.itemsize)
    assert abs(sent - predicted) <= 0.02 * predicted, f"a rank sends {sent} bytes, but wire_bytes is {predicted}"


@contextmanager
def _raising(*errors: type[Exception], otherwise: str) -> Iterator[None]:
    """Return a context that expects one of these errors; without it, raises an `AssertionError` with this message."""
    try:
        yield
    except errors:
        return
    raise AssertionError(otherwise)


def _averaged(codec: Codec, contribution: torch.Tensor, comm: Communicator, bucket: Bucket) -> torch.Tensor:
    flat = contribution.clone()
    codec.average(flat, comm, bucket.sizes)
    return flat


def _check_alike(tensor: torch.Tensor, comm: Communicator, what: str) -> None:
    everyones = [torch.empty_like(tensor) for _ in range(comm.size)]
    comm.all_gather(everyones, tensor)
    for rank, other in enumerate(everyones):
        assert _same(other, tensor), f"{what} is not bit-identical on ranks {rank} and {comm.rank}"


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether the tensors are equal bit for bit, NaN included."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


Make = Callable[[], Codec]
"""Factory of a codec; every rank calls it."""


def bytes_sent(make: Make, size: int, bucket: Bucket) -> float:
    """Return the mean number of bytes that a rank sends to compute one average, counted at the senders.

    The function starts ranks as threads. These choose algorithms as if latency were zero, which `wire_bytes` also
    assumes. The first average is not counted, because ranks then also exchange messages to compare their calls.

    Args:
        make: Function that makes the codec.
        size: Number of ranks.
        bucket: Shapes, dtype and kind of numbers to average.

    Example:
        >>> bytes_sent(un.compression.fp16, size=2, bucket=Bucket(shapes=[(100,)]))
        200.0
    """
    counters: list[_ByteCounter] = []

    def counted(inner: Transport) -> Transport:
        counters.append(_ByteCounter(inner))
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


class _ByteCounter(Wrapper):
    """Counts the bytes that this rank sends."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.sent = 0
        self.latency_s = 0.0
        self.second_per_byte = 1.0

    def wrap_child(self, inner: Transport) -> _ByteCounter:
        return _ByteCounter(inner)

    def post(self, batch: Sequence[Message]) -> Work:
        self.sent += sum(message.tensor.nbytes for message in batch if isinstance(message, Send))
        return super().post(batch)


NUMBERS = ("normal", "zero", "constant", "sparse", "huge", "tiny", "mixed", "outlier")
"""Kinds of values in contributions."""


@dataclass(frozen=True)
class Bucket:
    """A flat bucket of parameters, and the contribution of each rank.

    Attributes:
        shapes: Shapes of the parameters.
        dtype: Dtype of the bucket.
        numbers: Kind of values in the contributions, one of `NUMBERS`.
        seed: Seed for the contributions.

    Example:
        >>> bucket = Bucket(shapes=[(2, 3), (1,)], numbers="constant")
        >>> bucket.numel, bucket.contribution(rank=1).unique().tolist()
        (7, [1.7000000476837158])
    """

    shapes: Sequence[Sequence[int]]
    dtype: torch.dtype = torch.float32
    numbers: str = "normal"
    seed: int = 0

    @property
    def sizes(self) -> list[torch.Size]:
        """The shapes as `torch.Size`s, which codecs expect."""
        return [torch.Size(shape) for shape in self.shapes]

    @property
    def numel(self) -> int:
        """Total number of elements."""
        return sum(map(math.prod, self.shapes))

    def contribution(self, rank: int) -> torch.Tensor:
        """Return a rank's contribution: a new one-dimensional CPU tensor, with the same values at each call.

        Args:
            rank: The rank, 0 or more.
        """
        generator = torch.Generator().manual_seed(self.seed * 1000 + rank)
        values = torch.randn(self.numel, generator=generator, dtype=torch.float64)
        half = self.dtype == torch.float16
        if self.numbers == "zero":
            values.zero_()
        elif self.numbers == "constant":
            values.fill_(rank + 0.7)
        elif self.numbers == "sparse":
            values *= torch.rand(self.numel, generator=generator) < 0.02
        elif self.numbers == "huge":
            values *= 1e3 if half else 1e30
        elif self.numbers == "tiny":
            values *= 1e-7 if half else 1e-42
        elif self.numbers == "mixed":
            values *= 10.0 ** torch.randint(-4, 4, (self.numel,), generator=generator)
        elif self.numbers == "outlier":
            values[self.numel // 2 : self.numel // 2 + 1] *= 1e3
        return values.to(self.dtype)

    def contributions(self, size: int) -> list[torch.Tensor]:
        """Return the contributions of all ranks.

        Args:
            size: Number of ranks.

        Example:
            >>> [tensor.shape for tensor in Bucket(shapes=[(2, 3)]).contributions(size=2)]
            [torch.Size([6]), torch.Size([6])]
        """
        return [self.contribution(rank) for rank in range(size)]
