"""Two processes that say they are rank 0: each of them hears that it is so."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

INIT = "import sys, unisono as un; un.init('gloo', timeout=float(sys.argv[1]), **eval(sys.argv[2]))"

Start = Callable[..., Any]


@pytest.mark.soak
@pytest.mark.parametrize("by", ["environment", "address"])
def test_duplicate_rank_is_reported_to_both(start: Start, port: int, by: str) -> None:
    if by == "environment":
        given, env = {}, {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    else:
        given, env = {"init_method": f"tcp://127.0.0.1:{port}", "rank": 0, "world_size": 2}, {}
    both = [start([sys.executable, "-c", INIT, "55", repr(given)], env) for _ in range(2)]
    for process in both:
        _, said = process.communicate(timeout=300)
        assert "MismatchError: rank 0 of 2, init: two processes claim to be rank 0 of world" in said
