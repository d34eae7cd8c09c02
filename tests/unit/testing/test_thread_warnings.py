"""Warnings on ranks that are threads: contexts that overlap, and end in any order."""

from __future__ import annotations

import warnings

import pytest

import unisono as un


def warn_together(comm: un.Communicator) -> None:
    comm.barrier()
    warnings.warn(f"of rank {comm.rank}", stacklevel=1)
    comm.barrier()


@pytest.mark.ranks(3)
def test_rank_records_its_own_warnings(comm: un.Communicator) -> None:
    with pytest.warns(UserWarning, match="of rank") as recorded:
        warn_together(comm)
    assert [str(warning.message) for warning in recorded] == [f"of rank {comm.rank}"]


@pytest.mark.ranks(2)
def test_filters_are_those_of_the_rank(comm: un.Communicator) -> None:
    """Rank 1's context begins last, and ends last."""
    if comm.rank == 1:
        comm.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if comm.rank == 0 else "error")
        if comm.rank == 0:
            comm.barrier()
            warnings.warn("ignored", stacklevel=1)
            comm.barrier()
        else:
            comm.barrier()
            with pytest.raises(UserWarning):
                warnings.warn("an error", stacklevel=1)
    # Each has the filters of this project again, by which all warnings are errors.
    with pytest.raises(UserWarning):
        warnings.warn("an error", stacklevel=1)


def test_module_is_left_as_it_was() -> None:
    def state() -> list[int]:
        return [id(type(warnings)), *map(id, vars(warnings).values())]

    def program() -> list[None]:
        with warnings.catch_warnings():
            return un.testing.torch_ranks(2).run(dict)

    before = state()
    un.testing.torch_ranks(2).run(program)
    assert state() == before
