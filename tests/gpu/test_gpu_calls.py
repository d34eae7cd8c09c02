"""Collectives, messages and objects, with tensors on GPUs: NCCL at world 1 and on all GPUs, others on one GPU."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from gpu_devices import ALL, CPU, GPU, Place, listed
from nccl_stand_in import around

import unisono as un
from unisono.core.collective import COLLECTIVES
from unisono.errors import MismatchError
from unisono.testing.cases import CALLS, Case
from unisono.testing.check_case import Report, check_case, check_reports
from unisono.testing.conformance.world import numbers, together
from unisono.testing.reference import DTYPES, ops_for

places = pytest.mark.parametrize("place", ALL)


def reports(comm: un.Communicator, cases: list[Case]) -> list[Report]:
    return [check_case(comm, case) for case in cases]


def hold(place: Place, cases: list[Case]) -> None:
    for case, *found in zip(cases, *place.run(reports, cases), strict=True):
        check_reports(case, found)


# On the CPU, conformance tries all of them: these show that the test itself works.
ON_CPU = {"all_reduce", "all_to_all_single", "scatter_v"}
CASES = [
    pytest.param(call, *place.values, marks=place.marks, id=f"{call}-{place.id}")
    for call in CALLS
    for place in (ALL if call in ON_CPU else [*listed(CPU, on_cpu=[pytest.mark.soak]), *ALL[1:]])
]


@pytest.mark.parametrize(("call", "place"), CASES)
def test_call_equals_reference(call: str, place: Place) -> None:
    """Short and long, uneven, strided, asynchronous and blocking, from and to the last rank."""
    root = place.size - 1
    how: list[dict[str, Any]] = [
        {},
        {"async_op": True},
        {"layout": "every second"},
        {"layout": "transposed", "async_op": True},
        {"uneven": True, "numbers": "any"},
        {"dtype": torch.int64},
        {"dtype": torch.bool},
    ]
    cases = [Case(call, place.size, count, root=root, **each) for count in (0, 1, 6, 1001) for each in how]
    # All but complex numbers on NCCL go by torch's own reductions there.
    hold(place, [*cases, Case(call, place.size, 1 << 18, torch.bfloat16), Case(call, place.size, 12, torch.complex64)])


@places
@pytest.mark.parametrize("call", ["all_reduce", "reduce_scatter"])
def test_every_op_and_dtype_equals_reference(call: str, place: Place) -> None:
    assert COLLECTIVES[call].reduces
    hold(
        place,
        [
            Case(call, place.size, count, dtype, op, numbers=kind)
            for dtype in DTYPES
            for op in ops_for(dtype)
            for kind, count in (("any", 7), ("nan", 40))
        ],
    )


@places
def test_messages_objects_and_subgroups(place: Place) -> None:
    def program(comm: un.Communicator) -> str:
        together(comm)
        part = comm.dup()
        together(part)
        part.close()
        mine = {"rank": comm.rank, "here": numbers(comm, comm.rank)}
        for rank, found in enumerate(comm.all_gather_object(mine)):
            assert found["rank"] == found["here"].item() == rank
        comm.barrier()
        return comm.device.type

    assert place.run(program) == [place.device] * place.size


@places
def test_contributions_are_scaled(place: Place) -> None:
    def program(comm: un.Communicator) -> tuple[float, float]:
        blocking, asynchronous = numbers(comm, 1 + comm.rank), numbers(comm, 1 + comm.rank)
        comm.all_reduce(blocking, scale=0.5)
        comm.all_reduce(asynchronous, scale=0.5, async_op=True).wait()
        return blocking.tolist()[0], asynchronous.tolist()[0]

    half = place.size * (place.size + 1) / 4
    assert place.run(program) == [(half, half)] * place.size


@places
def test_values_on_a_device_are_compared(place: Place) -> None:
    """NaN and -0.0 are equal to themselves."""

    def program(comm: un.Communicator) -> str:
        state = {"layer": {"weight": torch.tensor([0.0, -0.0, float("nan")], device=comm.device)}, "step": 3}
        comm.agree(state, "state")
        comm.flush_agreements()
        state["layer"]["weight"][1] = comm.rank + 1
        comm.agree(state, "state")
        try:
            comm.flush_agreements()
        except MismatchError as error:
            return str(error)
        return "no difference"

    for text in place.run(program):
        assert ("'layer'" in text and "'weight'" in text) if place.size > 1 else text == "no difference"


@pytest.mark.gpu
@pytest.mark.skipif(GPU == "cuda", reason="NCCL itself takes its place")
@pytest.mark.parametrize(("op", "most"), [("sum", 16), ("avg", 18)])
def test_a_reduction_with_nccl_runs_few_functions_on_the_launching_thread(op: str, most: int) -> None:
    def program(comm: un.Communicator) -> int:
        tensor = torch.ones(4, device=GPU)
        ours = str(Path(un.__file__).parent)
        count = 0

        def note(frame: FrameType, event: str, _: object) -> None:
            nonlocal count
            count += event == "call" and frame.f_code.co_filename.startswith(ours)

        for _ in range(3):
            comm.all_reduce(tensor, op)
        sys.setprofile(note)
        comm.all_reduce(tensor, op)
        sys.setprofile(None)
        comm.barrier()
        return count

    assert max(un.launch(program, 2, "gloo", wrap=partial(around, kind=GPU), timeout=30)) <= most


@pytest.mark.gpu
@pytest.mark.skipif(GPU != "cuda", reason="NCCL needs GPUs")
def test_exclusive_gpu_selects_nccl() -> None:
    def program(comm: un.Communicator) -> tuple[str, str, float]:
        total = numbers(comm, comm.rank + 1)
        comm.all_reduce(total)
        return comm.backend, str(comm.device), total.item()

    count = torch.cuda.device_count()
    total = count * (count + 1) / 2
    assert un.launch(program, count) == [("nccl", f"cuda:{rank}", total) for rank in range(count)]
