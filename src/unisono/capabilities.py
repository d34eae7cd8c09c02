"""Which backend carries which operation on which device, as the transports declare it: the tables of the docs."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.schedules import COLLECTIVES
from unisono.transports import TRANSPORTS

__all__ = ["DEVICES", "backends", "how", "tables"]

DEVICES = ("cpu", "cuda")
"""What there is a table for."""

_MESSAGES = "send, recv"
# Parts of torch that only special builds of it have.
_RARE = frozenset({"ucc", "xccl"})


def backends() -> list[str]:
    """The backends that have a column: all of the registry, but for those that only special builds of torch have."""
    return [name for name in TRANSPORTS.names() if name not in _RARE]


def how(backend: str, operation: str, device: str) -> str:
    """In what way a backend carries an operation on tensors of a device.

    Args:
        backend: A transport's name.
        operation: A collective, or "send, recv".
        device: Of `DEVICES`.

    Returns:
        "native": by the backend itself, where its operation gives the right result for the dtype and reduce
        operation, else by a schedule of messages. "messages": by a schedule of messages, or, of "send, recv", as it is.
        Either with "by way of the CPU". "no": not at all.

    Example:
        >>> how("mpi", "all_reduce", "cuda"), how("thread", "all_reduce", "cpu"), how("nccl", "barrier", "cpu")
        ('native, by way of the CPU', 'messages', 'no')
    """
    declared = TRANSPORTS[backend].declared(backend)
    if device not in declared.devices:
        return "no"
    way = "native" if operation in declared.native else "messages"
    return f"{way}, by way of the CPU" if device in declared.staged else way


def tables() -> str:
    """All of it in Markdown: a table for each device, a row for each operation, a column for each backend."""
    operations = [_MESSAGES, *sorted(COLLECTIVES)]
    parts = []
    for device in DEVICES:
        shown = [name for name in backends() if device in TRANSPORTS[name].declared(name).devices]
        rows = [[operation, *(how(name, operation, device) for name in shown)] for operation in operations]
        parts.append("\n".join([f"### Tensors on {device.upper()}", "", *_table(["operation", *shown], rows)]))
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]
