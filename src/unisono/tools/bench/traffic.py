"""Memory traffic of torch operations: counts the bytes that operations read and write, without timing them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["MemoryTraffic", "counted"]

# Operations that overwrite their operand without reading it.
_ONLY_WRITE = {"copy_", "fill_", "zero_"}


@dataclass(slots=True)
class MemoryTraffic:
    """Bytes moved by torch operations.

    Attributes:
        read, written: Bytes of operands read and written. A byte that two operations read counts twice.
        largest_new: Size in bytes of the largest tensor that an operation allocated.
    """

    read: int = 0
    written: int = 0
    largest_new: int = 0


@contextmanager
def counted() -> Iterator[MemoryTraffic]:
    """Count this thread's operations in a `with` block. Other threads, and bytes that C code moves, are not counted.

    Example:
        >>> with counted() as traffic:
        ...     _ = torch.zeros(100).add_(torch.ones(100))
        >>> traffic.read, traffic.written, traffic.largest_new
        (800, 1200, 400)
    """
    counter = _Counter()
    with counter:
        yield counter.traffic


class _Counter(TorchDispatchMode):
    """Dispatch mode that reads from each operation's schema which operands are read and which are written."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.traffic = MemoryTraffic()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        result = func(*args, **given)
        if not func.is_view:
            self._count(func, args, given, result)
        return result

    def _count(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        operands = []
        schema = func._schema
        for index, argument in enumerate(schema.arguments):
            value = kwargs.get(argument.name, args[index] if index < len(args) else None)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(value):
                operands.append(tensor)
                self.traffic.written += tensor.nbytes if writes else 0
                reads = not writes or not (argument.is_out or schema.name.split("::")[1] in _ONLY_WRITE)
                self.traffic.read += tensor.nbytes if reads else 0
        known = {id(tensor) for tensor in operands}
        for tensor in _tensors(result):
            if id(tensor) not in known:
                self.traffic.largest_new = max(self.traffic.largest_new, tensor.nbytes)
                # Operations such as `empty` allocate memory, but don't write to it.
                self.traffic.written += 0 if "empty" in schema.name else tensor.nbytes


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
