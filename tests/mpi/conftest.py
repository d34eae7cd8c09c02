"""Ranks under mpirun: with the compiled parts, and without; started once for all files that want as many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest

from unisono.host.native import NO_EXTENSIONS
from unisono.testing.pools import RankPool


class MpiPool(RankPool):
    """Ranks that use the native core or not, as requested."""

    def __init__(self, size: int, no_extensions: str) -> None:
        super().__init__(size, "mpi", timeout=30)
        self._no_extensions = no_extensions

    def run(self, *args: Any, **options: Any) -> list[Any]:
        # Ranks are started when they are wanted.
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(NO_EXTENSIONS, self._no_extensions)
            return super().run(*args, **options)


@pytest.fixture(scope="session", params=["", pytest.param("1", marks=pytest.mark.soak)], ids=["compiled", "plain"])
def pools(request: pytest.FixtureRequest) -> Iterator[Callable[[int], RankPool]]:
    """Jobs by their number of ranks."""
    with ExitStack() as opened:
        yield cache(lambda size: opened.enter_context(MpiPool(size, request.param)))


@pytest.fixture(scope="module")
def ranks(pools: Callable[[int], RankPool], request: pytest.FixtureRequest) -> RankPool:
    """As many as the file's `RANKS`."""
    return pools(request.module.RANKS)
