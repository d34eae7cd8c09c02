"""Every collective equals its plain reference, whatever the arguments: samples here, and the whole grid as a soak."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, product
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pairwise import short

import unisono as un
from unisono.collectives.algorithms import serving
from unisono.core.collective import COLLECTIVES
from unisono.testing import pool, run_ranks, strategies
from unisono.testing.cases import CALLS, Case
from unisono.testing.check_case import Report, check_case, check_reports
from unisono.testing.memory_layouts import LAYOUTS
from unisono.testing.reference import DTYPES, ops_for

CHUNK_BYTES = 4096
BACKENDS = ("thread", "gloo", "shm", "tcp")
# Processes are dearer than threads.
LARGEST = {"thread": 8, "gloo": 4, "shm": 4, "tcp": 4}

# In `make test` few, since conformance has a sample of each call, too.
EXAMPLES = settings.default.max_examples if settings.default.max_examples > 100 else 4
# Others every time: what fails is printed so that it can be run again.
sampled = settings(
    max_examples=EXAMPLES, derandomize=False, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)


def run(backend: str, fn: Any, size: int, *args: Any, largest: int = 4) -> list[Any]:
    if backend == "thread":
        return run_ranks(fn, size, backend, *args, chunk_bytes=CHUNK_BYTES)
    return pool(backend, largest, chunk_bytes=CHUNK_BYTES).run(fn, *args, size=size)


# Gloo and tcp meet all calls in sub-groups below.
@short("backend,call", product(BACKENDS, CALLS), list(product(("thread", "shm"), CALLS)))
@sampled
@given(data=st.data())
def test_call_equals_its_reference(backend: str, call: str, data: st.DataObject) -> None:
    size = data.draw(strategies.worlds(LARGEST[backend]))
    case = data.draw(strategies.cases(size, call, CHUNK_BYTES))
    check_reports(case, run(backend, check_case, size, case))


def in_parts(comm: un.Communicator, parts: list[list[int]], plans: list[list[Case]]) -> list[Report]:
    color = next(index for index, part in enumerate(parts) if comm.rank in part)
    with comm.split(color, key=parts[color].index(comm.rank)) as part:
        return [check_case(part, case) for case in plans[color]]


@pytest.mark.parametrize("backend", BACKENDS)
@sampled
@given(data=st.data())
def test_concurrent_subgroups_equal_their_references(backend: str, data: st.DataObject) -> None:
    size = data.draw(strategies.worlds(LARGEST[backend]))
    parts = data.draw(strategies.parts(size))
    plans = [
        data.draw(st.lists(strategies.cases(len(part), chunk_bytes=CHUNK_BYTES), min_size=1, max_size=4))
        for part in parts
    ]
    found = run(backend, in_parts, size, parts, plans)
    for part, plan in zip(parts, plans, strict=True):
        for case, *reports in zip(plan, *(found[rank] for rank in part), strict=True):
            check_reports(case, reports)


@pytest.mark.soak
@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 8])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_whole_grid_equals_its_references(backend: str, call: str, size: int) -> None:
    every = grid(call, size)
    while cases := list(islice(every, 100)):
        found = run(backend, check_all, size, cases, largest=8)
        for case, *reports in zip(cases, *found, strict=True):
            check_reports(case, reports)


def check_all(comm: un.Communicator, cases: list[Case]) -> list[Report]:
    return [check_case(comm, case) for case in cases]


def grid(call: str, size: int) -> Iterator[Case]:
    """All algorithms, dtypes, ops and counts, each with some root and layout, and blocking or not."""
    chance = Random(f"{call} {size}")
    kinds = [
        (dtype, op) for dtype in DTYPES for op in (ops_for(dtype) if COLLECTIVES[call].reduces else ops_for(dtype)[:1])
    ]
    family = COLLECTIVES[call].family
    algorithms = [None, *serving(family, size, rounded=False, uneven=False)]
    for algorithm, (dtype, op) in product(algorithms, kinds):
        for count in sorted({0, 1, size - 1, size, size + 1, 1000, CHUNK_BYTES // dtype.itemsize + 1}):
            uneven = chance.random() < 0.5
            rounded = dtype.is_floating_point or dtype.is_complex
            if algorithm and algorithm not in serving(family, size, rounded=rounded, uneven=uneven):
                continue
            yield Case(
                call,
                size,
                count,
                dtype,
                op,
                chance.randrange(size) if COLLECTIVES[call].root else 0,
                chance.choice(LAYOUTS),
                algorithm,
                async_op=chance.random() < 0.5,
                uneven=uneven,
                numbers=chance.choice(["whole", "any", "nan"]),
                seed=chance.getrandbits(32),
            )
