"""The page of the docs that says what each backend carries is what the transports declare."""

from __future__ import annotations

from pathlib import Path

import pytest

from unisono.capabilities import DEVICES, backends, how, tables
from unisono.schedules import COLLECTIVES
from unisono.transports import TRANSPORTS

PAGE = Path(__file__).parents[2] / "docs" / "backends.md"


def test_the_page_says_what_is_declared() -> None:
    found = PAGE.read_text().partition("<!-- tables -->\n")[2]
    assert found == tables(), "put what unisono.capabilities.tables() returns under the mark in docs/backends.md"


@pytest.mark.parametrize("device", DEVICES)
def test_each_backend_and_operation_has_its_place(device: str) -> None:
    table = tables().split("### ")[1 + DEVICES.index(device)]
    head, _, *rows = [line for line in table.splitlines() if line.startswith("|")]
    assert [row.split("|")[1].strip() for row in rows] == ["send, recv", *sorted(COLLECTIVES)]
    shown = [cell.strip() for cell in head.split("|")[2:-1]]
    assert {"gloo", "mpi", "shm"} <= set(shown) <= set(backends())
    for name in set(backends()) - set(shown):
        assert how(name, "all_reduce", device) == "no"


@pytest.mark.parametrize("name", ["gloo", "nccl", "thread", "shm", "mpi"])
def test_a_declaration_is_what_a_transport_then_can(name: str) -> None:
    kind = TRANSPORTS[name]
    declared = kind.declared(name)
    assert declared.staged <= declared.devices
    assert declared.native <= set(COLLECTIVES)
    assert (how(name, "all_reduce", "cpu") == "no") == ("cpu" not in declared.devices)


def test_a_new_backend_would_be_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = tables()
    monkeypatch.setattr(TRANSPORTS["thread"], "native", frozenset({"barrier"}))
    assert tables() != before
