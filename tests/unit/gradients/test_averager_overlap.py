"""Start of bucket reductions: during backward with a spare core, otherwise at the end of the pass."""

from __future__ import annotations

import gc
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from averaged_models import MODELS, TINY, batches, made, same, stepped, wanted_of
from insides import control_of, transport_of
from torch import nn

import unisono as un
from unisono.testing import pool
from unisono.transports.shm import transport

# Over gloo, where buckets overlap as well, `test_averager` trains all of them.
CASES = [pytest.param(name, marks=[pytest.mark.soak] * (name not in {"plain", "complex and real"})) for name in MODELS]


def with_cores_to_spare(comm: un.Communicator) -> un.Communicator:
    """The same ranks over shared memory, as on a host of more processors."""
    part = comm.dup()
    transport_of(part).background = True
    assert part.overlaps
    return part


@pytest.mark.parametrize("name", CASES)
def test_means_are_equal_with_a_progress_thread(name: str) -> None:
    size, make = 3, MODELS[name]
    given = batches(size, 3)

    def program(comm: un.Communicator) -> list[list[torch.Tensor | None]]:
        with with_cores_to_spare(comm) as part:
            model = made(make)
            averager = un.GradientAverager(model, part, **TINY)
            steps = stepped(model, given[comm.rank])
            averager.remove()
        return steps

    results = pool("shm", size).run(program)
    for step in range(3):
        wanted = wanted_of(make, [given[rank][step] for rank in range(size)])
        assert all(same(found[step], wanted) for found in results)


@pytest.mark.parametrize("spare", [True, False])
def test_buckets_overlap_only_with_spare_cores(spare: bool) -> None:
    def program(comm: un.Communicator, spare: bool) -> list[bool]:
        # A model that an earlier test has left in this rank is another model, beside which nothing is sent early.
        gc.collect()
        with with_cores_to_spare(comm) as part:
            transport_of(part).background = spare
            model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)])
            averager = un.GradientAverager(model, part, bucket_cap_mb=64 / 2**20)
            found = []
            model[0].weight.register_hook(
                lambda _: found.extend(b.started for b in averager._averaging._reduction.contents)
            )
            model(torch.ones(2, 4)).sum().backward()
            averager.remove()
        return found

    # The pass comes to the first layer last.
    for found in pool("shm", 2).run(program, spare):
        assert found == [spare, spare, False]


@pytest.mark.parametrize(
    ("cores", "threads", "spare"), [((4, 4), 1, True), ((4, 3), 1, False), ((4, 4), 2, False), ((6, 8), 2, True)]
)
def test_ranks_agree_on_spare_cores(cores: tuple[int, int], threads: int, spare: bool) -> None:
    def program(comm: un.Communicator, cores: tuple[int, int], threads: int) -> bool:
        whole = transport_of(comm)
        group = replace(whole.group, name=f"{whole.group.name} of {cores}, {threads}")
        with (
            patch.object(transport, "cores", lambda: cores[comm.rank]),
            patch.object(torch, "get_num_threads", lambda: threads),
        ):
            made = transport.ShmTransport.connect(group, control_of(comm), whole._options)
        made.leave()
        made.close()
        return made.background

    assert pool("shm", 2).run(program, cores, threads) == [spare] * 2


@pytest.mark.parametrize(
    ("spare", "compression", "cap", "count"),
    [
        (False, None, None, 1),
        (True, None, None, 2),
        (False, "bf16", None, 2),
        (False, None, 20, 2),
        (True, None, 50, 1),
    ],
)
def test_one_bucket_suffices_without_overlap(
    spare: bool, compression: str | None, cap: float | None, count: int
) -> None:
    def program(comm: un.Communicator, spare: bool, compression: str | None, cap: float | None) -> int:
        with with_cores_to_spare(comm) as part:
            transport_of(part).background = spare
            model = nn.ParameterList(torch.zeros(4 << 20) for _ in range(2))
            averager = un.GradientAverager(model, part, bucket_cap_mb=cap, first_bucket_mb=cap, compression=compression)
            found = len(averager.buckets)
            averager.remove()
        return found

    assert pool("shm", 2).run(program, spare, compression, cap) == [count] * 2
