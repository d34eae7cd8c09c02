"""Errors say in words which group they are of, where its name is made of numbers that no program sees."""

from __future__ import annotations

import pytest
import torch

import unisono as un
from unisono.core.group import Group
from unisono.errors import MismatchError
from unisono.testing import run_ranks


@pytest.mark.parametrize(
    ("name", "members", "text"),
    [
        ("world", (0, 1), "world"),
        ("world12", (0, 1), "world"),
        ("slurm200505.3-world1", (0, 1), "world"),
        ("torch/0a1b2c3d", (0, 1), "world"),
        ("world/3.-7", (4,), "rank 4 (split 3 of world)"),
        ("world1/2.0/1.3", (1, 3), "ranks 1, 3 (split 1 of a part of world)"),
        ("world~2", (0, 2), "ranks 0, 2 (rebuild 2 of world)"),
        ("world1~1/2.0~3", range(9), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 1 more (rebuild 3 of a part of world)"),
        ("world/ends", (0, 2), "world/ends"),
    ],
)
def test_name_of_a_group_in_words(name: str, members: tuple[int, ...], text: str) -> None:
    assert Group(name, 0, tuple(members)).text == text


def test_errors_of_parts_name_their_ranks() -> None:
    def program(comm: un.Communicator) -> str:
        comm.dup()
        part = comm.split(comm.rank % 2)
        with pytest.raises(MismatchError) as raised:
            part.all_reduce(torch.ones(1 + comm.rank))
        return str(raised.value)

    texts = run_ranks(program, 4)
    for rank, text in enumerate(texts):
        ranks = "ranks 0, 2" if rank % 2 == 0 else "ranks 1, 3"
        assert text.startswith(f"rank {rank // 2} of 2, all_reduce #1 of {ranks} (split 2 of world): ranks differ")
        assert "world/" not in text


def test_hang_reports_of_parts_name_their_ranks() -> None:
    def program(comm: un.Communicator) -> None:
        part = comm.split(0)
        if comm.rank == 0:
            part.recv(torch.ones(1), 1, timeout=5.0)
        else:
            part.recv(torch.ones(1), 0, timeout=5.0)

    with pytest.raises(un.errors.DeadlockError) as raised:
        un.simulate(program, 2)
    assert "in group ranks 0, 1 (split 1 of world), for" in str(raised.value)
