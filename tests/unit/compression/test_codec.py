"""Names and settings of codecs, their messages, and their errors."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import unisono as un
from unisono.compression import CODECS, Codec, resolve
from unisono.compression.codecs.onebit import pack_signs, unpack_signs
from unisono.core.tracing import TraceEvent
from unisono.testing import pool, run_ranks
from unisono.testing.codecs import Bucket, bytes_sent, check_average
from unisono.wrappers.trace import Traced

NAMES = CODECS.names()


class Plain(Codec):
    """Loses nothing: what others are compared with, and a codec of another package."""

    name = "plain"

    def average(
        self,
        flat: torch.Tensor,
        comm: un.Communicator,
        shapes: Sequence[torch.Size],
        kept: torch.Tensor | None = None,
    ) -> None:
        self.prepare(flat, comm, shapes, kept)
        if kept is not None:
            kept.copy_(flat)
        comm.all_reduce(flat, "avg")

    def error_bound(self, flat: torch.Tensor, others: Sequence[torch.Tensor], shapes: Sequence[torch.Size]) -> float:
        return 0.0

    def wire_bytes(self, numel: int, shapes: Sequence[torch.Size], size: int, itemsize: int) -> float:
        return 2 * (size - 1) / size * numel * itemsize


@pytest.fixture
def plain() -> Iterator[None]:
    CODECS.register("plain", Plain)
    yield
    CODECS.unregister("plain")


@pytest.mark.parametrize("name", NAMES)
def test_codec_by_name_class_function_and_instance(name: str) -> None:
    factory = getattr(un.compression, name)
    codec = factory()
    assert resolve(codec) is codec
    assert {repr(resolve(spec)) for spec in (name, factory, partial(factory), codec)} == {repr(codec)}
    assert codec.name == name
    assert repr(codec).startswith(f"{name}(")


def test_codec_of_another_package(plain: None) -> None:
    assert isinstance(resolve("plain"), Plain)
    assert un.compression.plain is Plain
    assert repr(resolve("plain")) == "plain()"
    run_ranks(lambda comm: check_average(Plain, comm, Bucket([(3, 4)])), 2)


@pytest.mark.parametrize("wrong", ["fp8", 16, lambda: 16, None])
def test_unknown_codec_lists_the_known_ones(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="bf16, error_feedback, fp16, int4, int8"):
        resolve(wrong)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("topk", {"ratio": 0}),
        ("topk", {"ratio": 1.5}),
        ("randomk", {"ratio": -0.1}),
        ("int8", {"block": 0}),
        ("int4", {"block": 0}),
        ("onebit", {"block": 0}),
        ("powersgd", {"rank": 0}),
        ("error_feedback", {"codec": "error_feedback"}),
        ("error_feedback", {"codec": "fp8"}),
    ],
)
def test_wrong_settings_are_rejected(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|twice|unknown codec"):
        getattr(un.compression, name)(**settings)


@pytest.mark.parametrize(
    ("make", "ratio"),
    [
        (un.compression.fp16, 1.98),
        (un.compression.bf16, 1.98),
        (un.compression.int8, 3.9),
        (un.compression.int4, 7.7),
        (un.compression.onebit, 28),
        (un.compression.topk, 40),
        (un.compression.randomk, 90),
        (un.compression.powersgd, 40),
        (lambda: un.compression.error_feedback(un.compression.onebit()), 28),
    ],
)
def test_bytes_compared_with_a_float32_ring(make: Callable[[], Codec], ratio: float) -> None:
    assert bytes_of_plain() / bytes_sent(make, 4, LONG) >= ratio


LONG = Bucket([(400, 300), (200, 400)])


@cache
def bytes_of_plain() -> float:
    return bytes_sent(Plain, 4, LONG)


@pytest.mark.parametrize(
    ("name", "calls"),
    [("fp16", 2), ("int8", 2), ("int4", 2), ("onebit", 2), ("topk", 1), ("randomk", 1), ("powersgd", 2)],
)
def test_one_collective_per_stage(name: str, calls: int) -> None:
    events: list[TraceEvent] = []

    def program(comm: un.Communicator) -> None:
        codec, flat = resolve(name), torch.ones(600)
        codec.average(flat, comm, [torch.Size((20, 30))])
        comm.barrier()
        if comm.rank == 0:
            events.clear()
        comm.barrier()
        codec.average(flat, comm, [torch.Size((20, 30))])

    run_ranks(program, 2, wrap=lambda inner: Traced(inner, events.append))
    begun = [event.name for event in events if event.kind == "begin" and event.rank == 0 and event.name != "barrier"]
    assert len(begun) == calls, begun


def test_ranks_with_different_codecs_are_rejected() -> None:
    def program(comm: un.Communicator) -> str:
        codec = un.compression.topk(ratio=0.1 * (1 + comm.rank // 2))
        with pytest.raises(un.errors.MismatchError) as caught:
            codec.average(torch.ones(10), comm, [torch.Size((10,))])
        # Nothing was broken by it.
        comm.barrier()
        return str(caught.value)

    texts = run_ranks(program, 3)
    assert all("ranks 0, 1: 'topk(ratio=0.1)'; rank 2: 'topk(ratio=0.2)'" in text for text in texts), texts


@pytest.mark.parametrize("name", ["randomk", "powersgd"])
def test_ranks_at_different_steps_are_rejected(name: str) -> None:
    def program(comm: un.Communicator) -> None:
        codec, shapes = resolve(name), [torch.Size((20, 30))]
        before = codec.state_dict()
        codec.average(torch.ones(600), comm, shapes)
        codec.load_state_dict(before if comm.rank else codec.state_dict())
        with pytest.raises(un.errors.MismatchError, match=r"in 'compression', at \['state'\]: rank 0: "):
            codec.average(torch.ones(600), comm, shapes)

    run_ranks(program, 2)


@pytest.mark.parametrize("name", ["error_feedback", "powersgd"])
def test_sharing_a_codec_between_buckets_is_rejected(name: str) -> None:
    with un.init() as comm:
        codec = resolve(name)
        codec.average(torch.ones(600), comm, [torch.Size((20, 30))])
        with pytest.raises(ValueError, match=r"one codec per bucket, created by clone\(\)"):
            codec.average(torch.ones(800), comm, [torch.Size((20, 40))])


@pytest.mark.parametrize("name", NAMES)
def test_used_codec_can_be_pickled(name: str) -> None:
    with un.init() as comm:
        codec, flats = resolve(name), [torch.arange(600.0) for _ in range(2)]
        codec.average(torch.ones(600), comm, [torch.Size((20, 30))])
        for one, flat in zip((codec, pickle.loads(pickle.dumps(codec))), flats, strict=True):
            one.average(flat, comm, [torch.Size((20, 30))])
        assert torch.equal(*flats)


@pytest.mark.parametrize("name", NAMES)
def test_global_generator_is_unchanged(name: str) -> None:
    before = torch.get_rng_state()
    with un.init() as comm:
        resolve(name).average(torch.ones(600), comm, [torch.Size((20, 30))])
    assert torch.equal(torch.get_rng_state(), before)


def on_processes(comm: un.Communicator, bucket: Bucket) -> list[str]:
    """The codecs that keep the law; one that breaks it raises."""
    for name in CODECS.names():
        check_average(CODECS[name], comm, bucket)
    return CODECS.names()


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_between_processes(backend: str) -> None:
    bucket = Bucket([(40, 30), (17,)], torch.float32, "mixed")
    assert pool(backend, 3).run(on_processes, bucket) == [CODECS.names()] * 3


@given(st.lists(st.sampled_from([0.0, -0.0, 1.5, -2.5, 1e-45, float("inf"), -float("inf")]), min_size=1))
def test_signs_are_packed_and_unpacked(values: list[float]) -> None:
    flat = torch.tensor(values * 8)
    signs = unpack_signs(pack_signs(flat), torch.empty(len(flat), dtype=torch.float64))
    assert torch.equal(signs, torch.where(flat >= 0, 1.0, -1.0).double())
