"""Ranks under mpirun for the tests of one file: with the compiled parts, and without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from unisono.compiled import NO_EXTENSIONS
from unisono.testing.pools import RankPool


@pytest.fixture(scope="module", params=["", "1"], ids=["compiled", "plain"])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """As many as the file's `RANKS`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(NO_EXTENSIONS, request.param)
        with RankPool(request.module.RANKS, "mpi", timeout=30) as pool:
            yield pool
