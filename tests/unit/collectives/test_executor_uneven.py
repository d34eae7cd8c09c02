"""Collectives of tensors that other ranks know nothing of: every root, mistakes, order, and calls beside them."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from pairwise import short

import unisono as un
from unisono.collectives.algorithms import ALGORITHMS
from unisono.core.work import ResultWork
from unisono.testing import pool

BACKENDS = ["thread", "shm", "gloo"]
SIZE = 3
Call = Callable[[un.Communicator, torch.Tensor], Any]


def rows(comm: un.Communicator, count: int) -> torch.Tensor:
    """Return rows that tell their rank."""
    return torch.full((count, 2), comm.rank, dtype=torch.int16)


def calls_of_every_root(comm: un.Communicator) -> list[Any]:
    """Pass rank r `r` rows from every root, and back, blocking and by works that are waited for in another order."""
    found: list[Any] = []
    for root in range(comm.size):
        given = [rows(comm, r) for r in range(comm.size)] if comm.rank == root else None
        for algorithm in (None, *ALGORITHMS["gather"].names()):
            how = {"algorithm": algorithm}
            later = [
                comm.scatter_v(given, root, async_op=True, **how),
                comm.gather_v(rows(comm, comm.rank), root, async_op=True, **how),
            ]
            total = torch.ones(1)
            comm.all_reduce(total)
            now = [comm.gather_v(rows(comm, comm.rank), root, **how), comm.scatter_v(given, root, **how)]
            assert total.item() == comm.size
            assert str([work.result() for work in reversed(later)]) == str(now)
        found.append((now[1].tolist(), now[0] and [t.tolist() for t in now[0]], now[1].dtype))
    return found


@pytest.mark.parametrize("backend", ["thread", pytest.param("shm", marks=pytest.mark.soak), "gloo"])
def test_every_root_and_algorithm(backend: str) -> None:
    # Of four ranks, one passes on in a binomial tree what it does not receive itself.
    for rank, found in enumerate(pool(backend, 4).run(calls_of_every_root)):
        whole = [[[r, r]] * r for r in range(4)]
        for root, (scattered, gathered, dtype) in enumerate(found):
            assert (scattered, dtype) == ([[root, root]] * rank, torch.int16)
            assert gathered == (whole if rank == root else None)


ALL: dict[str, Call] = {
    "all_gather_v": lambda comm, t: comm.all_gather_v(t),
    "gather_v": lambda comm, t: comm.gather_v(t, 2),
    "all_to_all_v": lambda comm, t: comm.all_to_all_v([t[:r] for r in range(comm.size)]),
    "all_gather_v, later": lambda comm, t: comm.all_gather_v(t, async_op=True).result(),
    "gather_v, later": lambda comm, t: comm.gather_v(t, 2, async_op=True).result(),
}


def with_another_tensor(comm: un.Communicator, name: str, other: torch.Tensor) -> str:
    with comm.dup() as part, pytest.raises(un.errors.MismatchError) as caught:
        ALL[name](part, other if comm.rank == 1 else torch.zeros(4, 2))
    return caught.value.message


@short(
    "backend, name",
    product(["thread", "shm"], ALL),
    [*(("thread", name) for name in ALL), ("shm", "gather_v"), ("shm", "all_gather_v, later")],
)
def test_tensors_that_do_not_match_are_one_error_on_every_rank(backend: str, name: str) -> None:
    for other, quoted in (
        (torch.zeros(5, 3), r"float32 \(\d, 3\) on rank 1"),
        (torch.zeros(4, 2).long(), r"int64 \(\d, 2\) on rank 1"),
    ):
        told = pool(backend, SIZE).run(with_another_tensor, name, other)
        for message in told:
            assert re.search(rf"first dimension only: .*{quoted}.*Nothing was sent", message), message


def refused(comm: un.Communicator, given: Any, later: bool) -> tuple[str, float]:
    """Return the error of a list that rank 1 cannot scatter, and a sum after it."""
    mine = given if comm.rank == 1 else None
    with pytest.raises((TypeError, ValueError)) as caught:
        # Rank 0 makes a blocking call in any case.
        comm.scatter_v(mine, 1, async_op=True).wait() if later and comm.rank else comm.scatter_v(mine, 1)
    after = torch.ones(1)
    comm.all_reduce(after)
    return str(caught.value), after.item()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("given", "told"),
    [
        (None, "tensors must be given on rank 1, one tensor per rank"),
        ([torch.ones(1)] * 2, "each of the 3 ranks, not 2"),
        ([torch.ones(1), torch.ones(1), None], "numbers, not NoneType"),
        ([torch.ones(1), torch.ones(1), torch.ones(1, 1)], "tensors[2] has shape (1, 1)"),
        ([torch.ones([1] * 17)] * 3, "tensors[0] has 17 dimensions; at most 16"),
    ],
)
def test_a_list_that_the_root_cannot_scatter_is_refused_on_every_rank(backend: str, given: Any, told: str) -> None:
    for later in (False, True):
        found = pool(backend, SIZE).run(refused, given, later)
        assert [after for _, after in found] == [3.0] * SIZE
        assert told in found[1][0]
        assert found[0][0] == found[2][0] == "rank 1 passed no tensors that can be sent; its own error gives the reason"


def test_mistakes_of_one_rank_send_nothing() -> None:
    def program(comm: un.Communicator) -> float:
        t = torch.ones(2)
        mistakes: list[tuple[str, Callable[[], object]]] = [
            ("tensors is for rank 0 only", lambda: comm.scatter_v([t, t], 0)),
            ("dst=2 is not a rank", lambda: comm.gather_v(t, 2)),
            ("'rang'", lambda: comm.gather_v(t, algorithm="rang")),
            ("must be a list of tensors", lambda: comm.all_to_all_v(t)),  # type: ignore[call-overload]  # on purpose
            (r"tensors\[1\] has shape \(2, 1\)", lambda: comm.all_to_all_v([t, t[:, None]])),
            ("17 dimensions", lambda: comm.all_gather_v(torch.ones([1] * 17))),
        ]
        for told, call in mistakes if comm.rank == 1 else []:
            with pytest.raises((TypeError, ValueError), match=told):
                call()
        comm.all_reduce(t)
        return t[0].item()

    assert un.launch(program, 2, "thread", timeout=60.0) == [2.0, 2.0]


def test_roots_that_differ_are_one_error() -> None:
    def program(comm: un.Communicator) -> str:
        with pytest.raises(un.errors.MismatchError) as caught:
            comm.gather_v(torch.ones(comm.rank), comm.rank)
        return caught.value.message

    for message in un.launch(program, 2, "thread", timeout=60.0):
        assert "root 0" in message
        assert "root 1" in message


def test_a_work_is_of_use_before_its_result() -> None:
    def program(comm: un.Communicator) -> tuple[bool, list[int]]:
        work = comm.all_to_all_v([torch.arange(r) for r in range(comm.size)], async_op=True)
        assert isinstance(work, ResultWork)
        work.get_future().wait()
        with torch.inference_mode():
            return work.is_completed(), [len(t) for t in work.result(60.0)]

    assert un.launch(program, 3, "thread", timeout=60.0) == [(True, [r] * 3) for r in range(3)]


def test_full_checks_serve_them() -> None:
    def program(comm: un.Communicator) -> int:
        given = [torch.arange(r) for r in range(comm.size)] if comm.rank == 1 else None
        part = comm.scatter_v(given, 1)
        return sum(len(t) for t in comm.gather_v(part, 0) or [])

    assert un.launch(program, 3, "thread", timeout=60.0, check="full") == [3, 0, 0]
