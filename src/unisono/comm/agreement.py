"""Comparison of values that should be the same on all ranks: settings, plans, states."""

from __future__ import annotations

import dataclasses
import enum
import reprlib
import struct
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import PurePath
from threading import get_ident
from typing import Any

import torch

from unisono.comm.failures import Failures
from unisono.core.call import Agreed, Fingerprint, disagreement, hash_of
from unisono.core.failure import raise_caused
from unisono.core.flight_recorder import callers_place, site_text
from unisono.core.staging import digest
from unisono.errors import MismatchError
from unisono.serialization import decode, encode

__all__ = ["Agreements", "parts_of"]

_PLAIN = (bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range, slice, enum.Enum, PurePath)
"""Types whose `repr` shows the whole value."""

_SHORT = reprlib.Repr()
"""Formatter of values in errors."""
_SHORT.maxstring = _SHORT.maxother = 200


class Agreements:
    """Compares values that must be equal on all ranks; the next collective compares the values passed to `agree`.

    Communicators over the same ranks share the values passed to `agree`. A collective compares only the values that its
    own thread has passed, because ranks may run the collectives of several threads in different orders.

    Args:
        failures: The communicator's `Failures`, through which mismatches are raised.
        checked: Whether collectives compare the values; if False, only `flush_agreements` and `close` do.

    Attributes:
        waiting: Values that the next collective compares, each with the thread that passed it.
    """

    def __init__(self, failures: Failures, *, checked: bool) -> None:
        self._failures = failures
        self._group = failures.activity.group
        self._checked = checked
        self._values: list[tuple[int, Agreed]] = []
        self.waiting: Sequence[tuple[int, Agreed]] = self._values if checked else ()
        self._compared: dict[str, int] = {}

    def share(self, other: Agreements) -> None:
        """Share the values of another communicator of the same ranks."""
        self._values = other._values
        self.waiting = self._values if self._checked else ()

    def add(self, value: Any, name: str) -> None:
        """Add a snapshot of a value."""
        # Sort the parts, because the order of dicts and sets may differ between ranks; a container sorts before its
        # elements.
        parts = sorted(parts_of(value))
        agreed = Agreed(name, hash_of(tuple(parts)), tuple(parts), site_text(callers_place()) or "")
        self._values.append((get_ident(), agreed))

    def take(self, number: int) -> Fingerprint | None:
        """Remove this thread's pending values; return them as a call to compare first, or None if there are none."""
        here = get_ident()
        taken = tuple(agreed for thread, agreed in self._values if thread == here)
        if not taken:
            return None
        # Change the list in place, because communicators of the same ranks share it.
        self._values[:] = [each for each in self._values if each[0] != here]
        return Fingerprint(number, "agree", agreed=tuple(each[:2] for each in taken), parts=taken, site=taken[0].site)

    def compare(self, mine: Fingerprint, limit_s: float) -> None:
        """Compare values from `take`. Collective.

        A mismatch raises on every rank, so it doesn't break the communicator.
        """
        control = self._failures.control
        topic = f"agreements before call {self._failures.activity.calls}"
        try:
            if control.exchange_unless_equal(self._group, topic, mine.agreed, limit_s) is None:
                return
            values = control.exchange(self._group, f"{topic}, in full", mine.values(), limit_s)
        except BaseException as error:
            raise_caused(self._failures.report(error, "flush_agreements"), error)
        self._refuse_differences({rank: Fingerprint(*each) for rank, each in enumerate(values)})

    def compare_at_close(self) -> None:
        """Compare the pending values with those of the first rank to close; no rank waits for another."""
        mine = self.take(self._failures.activity.calls + 1) if self._failures.error() is None else None
        if mine is None:
            return
        own = encode((self._group.rank, mine.values()))
        rank, theirs = decode(self._failures.control.compare_set(f"{self._group.name}/agreements", b"", own))
        try:
            self._refuse_differences({self._group.rank: mine, rank: Fingerprint(*theirs)})
        except MismatchError as error:
            raise_caused(self._failures.report(error, "close"), error)

    def require_same(self, what: str, value: bytes, wrong: Exception) -> None:
        """Raise an error, and break the communicator, if a rank that called earlier passed a different value.

        No rank waits for another, and not every rank has to call `require_same`. If two ranks differ, the later call
        fails.

        Args:
            what: Description of the value. Values with equal descriptions are compared in the order of the calls.
            value: Any bytes.
            wrong: The error to raise.
        """
        if self._failures.activity.life.closed or self._group.size == 1:
            return
        control = self._failures.control
        number = self._compared[what] = self._compared.get(what, 0) + 1
        key = f"{self._group.name}/{what}/{number}"
        first = control.compare_set(key, b"", value)
        if control.add(f"{key}/ranks", 1) == self._group.size:
            control.delete(key)
            control.delete(f"{key}/ranks")
        if first != value:
            raise self._failures.report(wrong, "a comparison of samples")

    def _refuse_differences(self, prints: dict[int, Fingerprint]) -> None:
        difference = disagreement(prints)
        if difference:
            raise self._failures.with_context(MismatchError(difference), "agree")


def parts_of(value: Any, path: str = "", inside: tuple[int, ...] = ()) -> Iterator[tuple[str, int, str]]:
    """Yield the path, a digest and a description of each element of a value. Equal values have equal digests.

    Args:
        value: Number, string, tensor, array, module, optimizer or dataclass, or a container of these.
        path: Location within the caller's value.
        inside: Identities of the containers that enclose the value.

    Raises:
        TypeError: An element's type cannot be compared.
        ValueError: A container contains itself.

    Example:
        >>> [path for path, _, _ in parts_of({"lr": 0.1, "layers": [1, 2]})]
        ['', "['lr']", "['layers']", "['layers'][0]", "['layers'][1]"]
    """
    if id(value) in inside:
        raise ValueError(f"{path} is a container that is in itself")
    if isinstance(value, torch.Tensor):
        yield path, *_tensor(value, path)
        return
    kind, entries = _entries(value)
    if entries is None:
        yield path, *_leaf(value, path)
        return
    yield path, hash_of((kind, len(entries))), f"{kind} of {len(entries)}"
    for where, entry in entries:
        yield from parts_of(entry, f"{path}{where}", (*inside, id(value)))


def _entries(value: Any) -> tuple[str, list[tuple[str, Any]] | None]:
    """Return a value's kind, and its elements with their locations (None if the value is not a container)."""
    kind = type(value).__name__
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
        value = value.state_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return kind, [(f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        return "dict", [(f"[{_key(key)}]", entry) for key, entry in value.items()]
    if isinstance(value, Set):
        return "set", [(f"{{{_key(entry)}}}", None) for entry in value]
    if isinstance(value, Sequence) and not isinstance(value, (*_PLAIN, bytearray, memoryview)):
        return kind, [(f"[{index}]", entry) for index, entry in enumerate(value)]
    return kind, None


def _key(key: Any) -> str:
    parts = list(parts_of(key))
    return repr(key) if len(parts) == 1 else f"{_SHORT.repr(key)} {hash_of(tuple(parts)):016x}"


def _tensor(value: torch.Tensor, path: str) -> tuple[int, str]:
    if value.layout is not torch.strided or value.is_meta or value.is_quantized:
        raise TypeError(f"{path or 'the value'} is a tensor without plain memory: {value.layout} on {value.device}")
    kind = f"{str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    content = digest(value)
    shown = repr(value.item()) if value.numel() == 1 else f"digest {content:016x}"
    return hash_of((kind, content)), f"{kind}, {shown}"


def _leaf(value: Any, path: str) -> tuple[int, str]:
    kind = type(value).__name__
    if isinstance(value, float | complex):
        number = complex(value)
        return hash_of((kind, struct.pack("<2d", number.real, number.imag))), repr(value)
    if isinstance(value, _PLAIN):
        return hash_of((kind, repr(value))), _SHORT.repr(value)
    if isinstance(value, bytearray | memoryview):
        return hash_of((kind, bytes(value))), _SHORT.repr(bytes(value))
    if hasattr(value, "__array_interface__") and not value.dtype.hasobject:
        array = f"{value.dtype} array of shape {value.shape}"
        return hash_of((array, value.tobytes())), f"{array}, {_SHORT.repr(value.tolist())}"
    raise TypeError(
        f"{path or 'the value'} is a {kind}, which ranks cannot compare: pass numbers, strings, tensors, modules, "
        "dataclasses, or containers of them"
    )
