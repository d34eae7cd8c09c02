"""A transport that another distribution offers by an entry point: found by its name alone, it meets all checks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import unisono as un
from unisono.core import registry
from unisono.testing import TransportConformance, run_ranks
from unisono.transports import TRANSPORTS
from unisono.transports.thread import ThreadTransport

MODULE = '''
"""Transport of another package: threads, with a record of the messages."""

from unisono.transports.thread import ThreadTransport


class Courier(ThreadTransport):
    carried = []

    def post(self, batch):
        self.carried.append((self.rank, len(batch)))
        return super().post(batch)

    def split(self, group):
        return Courier(group, self._queue, self._timeout_s)
'''
ENTRY_POINTS = """
[unisono.transports]
courier = someones_courier:Courier
thread = someones_courier:Courier
lost = someones_courier:Missing

[unisono.algorithms.all_reduce]
someones = unisono.collectives.algorithms.all_reduce.ring
"""


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder on the path, as pip would have filled it."""
    folder = tmp_path_factory.mktemp("site")
    about = folder / "someones_courier-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: someones-courier\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / "someones_courier.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        # This process has looked for entry points already, before there was one.
        registry.entry_points_of.cache_clear()
        yield folder
    sys.modules.pop("someones_courier", None)
    registry.entry_points_of.cache_clear()


@pytest.mark.soak
class TestCourier(TransportConformance):
    """All checks; in `make test` the same class meets them when it is registered: see test_third_party.py."""

    backend = "courier"


def summed(comm: un.Communicator) -> tuple[str, list[float]]:
    t = torch.full((3,), comm.rank + 1.0)
    comm.all_reduce(t)
    return comm.backend, t.tolist()


def test_entry_point_transport_delivers() -> None:
    courier = TRANSPORTS["courier"]
    courier.carried.clear()  # type: ignore[attr-defined]  # of the temporary module
    assert run_ranks(summed, 2, "courier") == [("courier", [3.0] * 3)] * 2
    assert {rank for rank, _ in courier.carried} == {0, 1}  # type: ignore[attr-defined]  # of the temporary module


def test_entry_point_name_is_listed() -> None:
    assert {"courier", "thread", "shm"} <= set(TRANSPORTS.names())
    with pytest.raises(ValueError, match=r"unknown transport 'pigeon'; known: courier, "):
        TRANSPORTS["pigeon"]


def test_entry_point_cannot_replace_a_builtin() -> None:
    assert TRANSPORTS["thread"] is ThreadTransport
    with pytest.raises(ValueError, match="'courier' exists already"):
        TRANSPORTS.register("courier", ThreadTransport)


def test_broken_entry_point_is_an_error() -> None:
    with pytest.raises(AttributeError, match="Missing"):
        TRANSPORTS["lost"]


def test_algorithm_is_found_by_entry_point() -> None:
    def program(comm: un.Communicator) -> list[float]:
        t = torch.full((3,), comm.rank + 1.0)
        comm.all_reduce(t, algorithm="someones")
        return t.tolist()

    assert run_ranks(program, 2, "thread") == [[3.0] * 3] * 2


def test_fresh_process_finds_the_entry_point() -> None:
    """Nothing there has looked for entry points before."""
    found = un.launch(lambda comm: run_ranks(summed, 2, "courier"), 1, "shm", threads=1)
    assert found == [[("courier", [3.0] * 3)] * 2]
