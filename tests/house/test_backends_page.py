"""The tables of docs/backends.md are what the transports declare; run as a program, this file writes them there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from unisono.collectives.algorithms import COLLECTIVES
from unisono.transports import TRANSPORTS

PAGE = Path(__file__).parents[2] / "docs" / "backends.md"
MARK = "<!-- tables -->\n"
DEVICES = ("cpu", "cuda")
# Parts of torch that only special builds of it have.
RARE = frozenset({"ucc", "xccl"})


def backends() -> list[str]:
    """Backends that have a column: all of the registry but the rare ones."""
    return [name for name in TRANSPORTS.names() if name not in RARE]


def how(backend: str, operation: str, device: str) -> str:
    """A backend's way of carrying a collective, or "send, recv", on tensors of a device, in the words of the page."""
    declared = TRANSPORTS[backend].declared(backend)
    if device not in declared.devices:
        return "no"
    if device in declared.host_staged:
        return "staged"
    return "native" if operation in declared.native else "messages"


def tables() -> str:
    """Markdown with a table for each device, a row for each operation, a column for each backend."""
    operations = ["send, recv", *sorted(COLLECTIVES)]
    parts = []
    for device in DEVICES:
        shown = [name for name in backends() if device in TRANSPORTS[name].declared(name).devices]
        rows = [[operation, *(how(name, operation, device) for name in shown)] for operation in operations]
        parts.append("\n".join([f"## Tensors on {device.upper()}", "", *table(["operation", *shown], rows)]))
    return "\n\n".join(parts) + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def test_page_matches_declarations() -> None:
    found = PAGE.read_text().partition(MARK)[2]
    assert found == tables(), "run python tests/house/test_backends_page.py"


@pytest.mark.parametrize("device", DEVICES)
def test_every_backend_and_operation_is_listed(device: str) -> None:
    shown_table = tables().split("## ")[1 + DEVICES.index(device)]
    head, _, *rows = [line for line in shown_table.splitlines() if line.startswith("|")]
    assert [row.split("|")[1].strip() for row in rows] == ["send, recv", *sorted(COLLECTIVES)]
    shown = [cell.strip() for cell in head.split("|")[2:-1]]
    assert {"gloo", "mpi", "shm"} <= set(shown) <= set(backends())
    for name in set(backends()) - set(shown):
        assert how(name, "all_reduce", device) == "no"


@pytest.mark.parametrize("name", ["gloo", "nccl", "thread", "shm", "mpi"])
def test_declaration_matches_the_transport(name: str) -> None:
    kind = TRANSPORTS[name]
    declared = kind.declared(name)
    assert declared.host_staged <= declared.devices
    assert declared.native <= set(COLLECTIVES)
    assert (how(name, "all_reduce", "cpu") == "no") == ("cpu" not in declared.devices)


def test_every_path_is_known() -> None:
    assert how("mpi", "all_reduce", "cuda") == "staged"
    assert how("thread", "all_reduce", "cpu") == "messages"
    assert how("nccl", "barrier", "cpu") == "no"


def test_new_backend_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    before = tables()
    monkeypatch.setattr(TRANSPORTS["thread"], "native", frozenset({"barrier"}))
    assert tables() != before


if __name__ == "__main__":
    PAGE.write_text("".join([*PAGE.read_text().partition(MARK)[:2], tables()]))
