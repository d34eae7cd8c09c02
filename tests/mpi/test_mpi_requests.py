"""The parts of the MPI backend that need no MPI: what launchers tell, what is compared, how floats are ordered."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unisono.core.call import hash_of
from unisono.core.clock import poll_until
from unisono.core.types import Recv, ReduceOp, Send
from unisono.errors import MismatchError, PeerLostError, UnavailableError
from unisono.host import mpi_library
from unisono.host.launched import Launched
from unisono.host.mpi_library import check_world, env_without_launcher, launched, name_of
from unisono.testing.reference import reduced
from unisono.transports.mpi import point_to_point
from unisono.transports.mpi.consistency import MpiAgreement
from unisono.transports.mpi.reduce_op import finish, prepare, reducible
from unisono.transports.mpi.requests import envelope_of


class Request:
    """As mpi4py has them; done when it says so, after `meanwhile`."""

    def __init__(self) -> None:
        self.done = False
        self.meanwhile: Callable[[], object] = lambda: None

    def Test(self) -> bool:  # noqa: N802  # MPI's name
        self.meanwhile()
        return self.done


def test_abandoned_request_keeps_its_memory() -> None:
    first, second, memory = Request(), Request(), torch.zeros(1)
    forsaken, number = weakref.ref(memory), 0

    def keep(request: Request, held: object) -> None:
        point_to_point.keep([(request, held)], nullcontext())

    def other() -> None:
        nonlocal number
        number += 1
        if number == 1:
            thread = threading.Thread(target=keep, args=(second, forsaken()))
            thread.start()
            thread.join()

    first.meanwhile, first.done = other, True
    keep(first, None)
    del memory
    gc.collect()
    assert forsaken() is not None
    second.done = True
    point_to_point.keep([], nullcontext())
    gc.collect()
    assert forsaken() is None


def test_mismatch_does_not_keep_later_messages_from_being_posted() -> None:
    posted = []

    def start(buffer: list[bytearray], peer: int, tag: int) -> Request:
        posted.append(peer)
        request = Request()
        request.done = True
        return request

    def receive(buffer: list[bytearray], peer: int, tag: int) -> Request:
        envelope = envelope_of(Send(torch.ones(3), 0), 0)
        buffer[0][: len(envelope)] = envelope
        return start(buffer, peer, tag)

    comms: Any = SimpleNamespace(
        mpi=SimpleNamespace(BYTE=None, Exception=OSError),
        users=SimpleNamespace(Isend=start, Irecv=receive),
        own=SimpleNamespace(Get_rank=lambda: 0),
        turn=nullcontext(),
        largest_tag=100,
    )
    messages = point_to_point.MpiMessages(comms, 1.0, lambda peers: None, 1)
    work = messages.post([Recv(torch.zeros(2), 1), Send(torch.ones(2), 2)])
    with pytest.raises(MismatchError, match="rank 1 sent 3 elements"):
        work.wait()
    assert posted == [1, 2]


NAMES = "INT8_T INT16_T INT32_T INT64_T UINT8_T UINT16_T UINT32_T UINT64_T FLOAT DOUBLE SUM PROD MIN MAX BAND BOR BXOR"
FAKE = SimpleNamespace(**{name: name for name in NAMES.split()})


@pytest.mark.parametrize(
    ("environment", "rank", "size"),
    [
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "3"}, 3, 4),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, 0, 2),
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}, 1, 2),
        ({"PMIX_RANK": "1"}, 1, None),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "SLURM_PROCID": "0", "MPI_LOCALNRANKS": "2"}, 1, 2),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "SLURM_PROCID": "0"}, 1, 2),
    ],
)
def test_launchers_are_detected_by_their_variables(environment: dict[str, str], rank: int, size: int | None) -> None:
    found = launched(environment)
    assert found is not None
    assert (found.rank, found.size) == (rank, size)


@pytest.mark.parametrize(
    "environment",
    [{}, {"RANK": "0", "WORLD_SIZE": "2"}, {"PMI_RANK": "0", "PMI_SIZE": "2", "SLURM_PROCID": "0"}],
)
def test_foreign_variables_are_not_a_launcher(environment: dict[str, str]) -> None:
    assert launched(environment) is None


def test_launcher_variables_are_not_inherited() -> None:
    theirs = {"OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0", "PMI_SIZE": "2", "PRTE_LAUNCHED": "1"}
    users = {"OMPI_MCA_btl": "tcp", "PMIX_MCA_gds": "hash", "OMPI_ALLOW_RUN_AS_ROOT": "1", "PATH": "/bin"}
    assert env_without_launcher(theirs | users) == users


def fake_mpi(size: int) -> SimpleNamespace:
    return SimpleNamespace(
        COMM_WORLD=SimpleNamespace(Get_size=lambda: size), Get_library_version=lambda: "MPICH Version:\t5.0.2\nmore"
    )


def test_single_rank_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    check_world(fake_mpi(1), 1)
    check_world(fake_mpi(2), 2)
    assert name_of(fake_mpi(1)) == "MPICH 5.0.2"
    monkeypatch.setattr(mpi_library, "launched", lambda: None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    with pytest.raises(UnavailableError, match=r"torchrun does not start MPI.*mpirun -n 4"):
        check_world(fake_mpi(1), 4)
    monkeypatch.setattr(mpi_library, "launched", lambda: Launched("some mpiexec", 0, 4))
    with pytest.raises(UnavailableError, match=r"some mpiexec has started 4 .* MPICH 5\.0\.2.* -n 4"):
        check_world(fake_mpi(1), 4)


@pytest.mark.parametrize(
    ("by", "name", "fits"),
    [
        ("Open MPI's mpirun", "Open MPI v5.0.11, package: x", True),
        ("Open MPI's mpirun", "MPICH Version: 5.0.2", False),
        ("mpiexec of MPICH or Intel MPI", "Intel(R) MPI Library 2021.14 for Linux", True),
        ("mpiexec of MPICH or Intel MPI", "Open MPI v5.0.11, package: x", False),
        ("a launcher that speaks PMIx", "MPICH Version: 5.0.2", True),
    ],
)
def test_launcher_is_checked_before_mpi_init(monkeypatch: pytest.MonkeyPatch, by: str, name: str, fits: bool) -> None:
    started = []
    mpi = SimpleNamespace(
        Is_finalized=lambda: False,
        Is_initialized=lambda: False,
        Get_library_version=lambda: name,
        Init_thread=started.append,
        THREAD_MULTIPLE=3,
    )
    monkeypatch.setattr(mpi_library, "imported", lambda: mpi)
    monkeypatch.setattr(mpi_library, "launched", lambda: Launched(by, 0, 2))
    if fits:
        assert mpi_library.library() is mpi
    else:
        with pytest.raises(UnavailableError, match="this launcher does not belong"):
            mpi_library.library()
    assert started == ([3] if fits else [])


def test_wait_ends_at_deadline_or_by_its_check() -> None:
    asked = 0

    def never() -> bool:
        nonlocal asked
        asked += 1
        return False

    assert not poll_until(never, time.monotonic() + 0.01, spins=3)
    assert asked > 3
    assert poll_until(lambda: True, time.monotonic() - 1)

    def broken() -> None:
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        poll_until(never, time.monotonic() + 60, broken, spins=1)


def agreements(size: int) -> list[MpiAgreement]:
    """Agreements of ranks without MPI: only their contribution to the sum is checked."""
    found = []
    for rank in range(size):
        own = SimpleNamespace(Get_rank=lambda rank=rank: rank, Get_size=lambda: size, Iallreduce=None)
        comms = SimpleNamespace(mpi=SimpleNamespace(IN_PLACE=0, UINT64_T=0, SUM=0), own=own, turn=None)
        found.append(MpiAgreement(comms, lambda peers: None, 1))  # type: ignore[arg-type]  # wrong or narrower on purpose
    return found


def test_matching_signatures_sum_to_zero() -> None:
    sends = [[0, 3, 5], [2, 0, 7], [2**40, 1, 9]]
    receives = [[row[rank] for row in sends] for rank in range(3)]
    ranks = agreements(3)
    total = sum(one.rows_of(sends[r], receives[r]) for r, one in enumerate(ranks))
    assert total % 2**64 == 0
    # Two mistakes that would cancel each other in a plain sum.
    receives[1][0] += 1
    receives[2][0] -= 1
    total = sum(one.rows_of(sends[r], receives[r]) for r, one in enumerate(ranks))
    assert total % 2**64 != 0


def test_signatures_of_different_calls_differ() -> None:
    calls = [("all_reduce", "sum", None, "float32", (4,)), ("all_reduce", "max", None, "float32", (4,)), ("barrier",)]
    assert len({hash_of(call) for call in calls}) == 3
    assert hash_of(calls[0]) == hash_of(tuple(calls[0]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
def test_float_order_is_kept_by_integers(dtype: torch.dtype, op: ReduceOp) -> None:
    values = [0.0, -0.0, 1.0, -1.0, 3e-5, -3e-5, 100.0, torch.inf, -torch.inf, torch.nan]
    left = torch.tensor([a for a in values for _ in values], dtype=dtype)
    right = torch.tensor([b for _ in values for b in values], dtype=dtype)
    wanted = reduced([left, right], op)
    found = []
    for first, second in ((left.clone(), right.clone()), (right.clone(), left.clone())):
        prepare(FAKE, second, op)
        tensor, kind, by = prepare(FAKE, first, op)
        whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        assert (kind, by) == (f"INT{8 * dtype.itemsize}_T", op.name)
        pick = torch.minimum if op is ReduceOp.MIN else torch.maximum
        tensor.view(whole).copy_(pick(tensor.view(whole), second.view(whole)))
        finish(first, op)
        assert not wanted.complaint(first)
        found.append(first.view(torch.uint8))
    assert torch.equal(*found), "the bits depend on the order of ranks"


def test_unsupported_mpi_reductions_use_messages() -> None:
    assert not reducible(torch.complex64, ReduceOp.PRODUCT)
    assert not reducible(torch.complex32, ReduceOp.SUM)
    assert reducible(torch.bfloat16, ReduceOp.SUM)


def test_frequent_polling_checks_for_failures() -> None:
    looks = []

    def look() -> None:
        looks.append(time.monotonic())
        if len(looks) == 3:
            raise PeerLostError("rank 1 is lost")

    began = time.monotonic()
    with pytest.raises(PeerLostError, match="rank 1 is lost"):
        poll_until(lambda: False, began + 60, look, spins=10**9)
    assert not poll_until(lambda: False, began, spins=10**9)
