"""Shares of what all ranks have, and what is each rank's own, on as many ranks as you like."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import unisono as un
from unisono.checkpoint import CorruptError, PerRank, StateError
from unisono.checkpoint.saver import shares
from unisono.testing import run_ranks


@given(
    st.lists(st.tuples(st.integers(0, 50_000), st.sampled_from([1, 2, 4, 8, 16])), max_size=20),
    st.integers(1, 17),
)
def test_shards_cover_and_balance(sizes: list[tuple[int, int]], ranks: int) -> None:
    tensors = [(f"t{i}", count * item, item) for i, (count, item) in enumerate(sizes)]
    given_out = shares(tensors, ranks)
    assert len(given_out) == ranks
    found: dict[str, list[tuple[int, int]]] = {name: [] for name, _, _ in tensors}
    for part in given_out:
        start = 0
        for piece in part:
            item = {name: item for name, _, item in tensors}[piece.name]
            assert start % item == piece.start % item == piece.stop % item == 0
            start += piece.stop - piece.start
            found[piece.name].append((piece.start, piece.stop))
    for name, nbytes, _ in tensors:
        assert [start for start, _ in found[name]] == [0, *(stop for _, stop in found[name][:-1])]
        assert found[name][-1][1] == nbytes
    loads = [sum(piece.stop - piece.start for piece in part) for part in given_out]
    assert max(loads) - sum(loads) / ranks <= 4096 + 16


# -- each rank's own ---------------------------------------------------------------------------


def own(comm: un.Communicator, path: str, elsewhere: Any) -> Any:
    un.checkpoint.save(path, {"mine": PerRank({"r": comm.rank, "t": torch.full((2,), comm.rank)}, elsewhere)}, comm)


def taken(comm: un.Communicator, path: str, elsewhere: Any) -> Any:
    state = un.checkpoint.load(path, {"mine": PerRank({"r": -1, "t": torch.zeros(2)}, elsewhere)}, comm)
    obj = state["mine"].obj
    return obj["r"], int(obj["t"][0])


@pytest.mark.parametrize(("saved", "loaded"), [(2, 2), (3, 1), (2, 4), (1, 3)])
def test_per_rank_state_loads_on_another_number_of_ranks(tmp_path: Path, saved: int, loaded: int) -> None:
    for elsewhere in ("modulo", "shared"):
        run_ranks(own, saved, "thread", str(tmp_path), elsewhere)
        assert run_ranks(taken, loaded, "thread", str(tmp_path), elsewhere) == [(r % saved,) * 2 for r in range(loaded)]
    run_ranks(own, saved, "thread", str(tmp_path), "keep")
    kept = [(r, r) if r < saved else (-1, 0) for r in range(loaded)]
    assert run_ranks(taken, loaded, "thread", str(tmp_path), "keep") == kept
    run_ranks(own, saved, "thread", str(tmp_path), "refuse")
    if saved == loaded:
        assert run_ranks(taken, loaded, "thread", str(tmp_path), "refuse") == kept
    else:
        with pytest.raises(StateError, match=f"each of the {saved} ranks"):
            run_ranks(taken, loaded, "thread", str(tmp_path), "refuse")


class Sampler(torch.utils.data.Sampler[int]):
    """Differs from rank to rank, and says so by being a sampler."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, int]:
        return {"rank": self.rank}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.rank = state["rank"]


def test_samplers_generators_and_codecs_are_saved_by_default(tmp_path: Path) -> None:
    def state_of(rank: int) -> dict[str, Any]:
        codec = un.compression.error_feedback(un.compression.onebit)
        return {"sampler": Sampler(rank), "generator": torch.Generator().manual_seed(rank), "codec": codec}

    def program(comm: un.Communicator) -> tuple[int, bool]:
        un.checkpoint.save(tmp_path, state_of(comm.rank), comm)
        state = un.checkpoint.load(tmp_path, state_of(9), comm)
        return state["sampler"].rank, torch.equal(
            state["generator"].get_state(), state_of(comm.rank)["generator"].get_state()
        )

    assert run_ranks(program, 3) == [(0, True), (1, True), (2, True)]


def test_errors_reach_all_ranks_with_their_path() -> None:
    error = CorruptError("damaged: 'w'", path="runs/7", tensors=["w"], rank=1, size=4)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is CorruptError
    assert (str(copy), copy.tensors, copy.path) == (str(error), ("w",), "runs/7")
    assert str(error) == "rank 1 of 4: checkpoint runs/7: damaged: 'w'"
