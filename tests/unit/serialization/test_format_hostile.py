"""Bytes that are no value end in ValueError, run no code of a class, import nothing, and cost no memory."""

from __future__ import annotations

import dataclasses
import enum
import struct
import sys
import tracemalloc
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
from hypothesis import example, given
from reachable import reachable
from serialization_values import Plain, tensors, values

from unisono import serialization


class Access(enum.Flag):
    READ = 1
    WRITE = 2
    RUN = 4

    @classmethod
    def _missing_(cls, value: object) -> Any:
        made.append(value)
        return super()._missing_(value)


class Bits(enum.IntFlag):
    LOW = 1
    HIGH = 4


made: list[object] = []
"""The values for which code of a class has run."""


def test_no_constructor_runs() -> None:
    sneaky = Plain(1)
    sneaky.x = "explode"
    assert serialization.decode(serialization.encode(sneaky)).x == "explode"


def flag(member: enum.Flag, number: int) -> bytes:
    """The bytes of another value of its class."""
    assert isinstance(member.value, int)
    return serialization.encode(member).removesuffix(struct.pack("<q", member.value)) + struct.pack("<q", number)


def test_decoding_flags_has_no_side_effects() -> None:
    known = Access.READ | Access.WRITE
    made.clear()
    held = reachable(Access), reachable(Bits)
    assert serialization.decode(flag(Access.READ, 3)) is known
    both, none, high = (serialization.decode(flag(*of)) for of in ((Access.READ, 6), (Access.READ, 0), (Bits.LOW, 12)))
    assert (type(both), both.value, both.name, Access.RUN in both) == (Access, 6, "WRITE|RUN", True)
    assert (both & Access.RUN, bool(none), none.value) == (Access.RUN, False, 0)
    assert (type(high), high, hash(high), Bits.HIGH in high, high.name) == (Bits, 12, hash(12), True, "HIGH|8")
    for number in (8, -1):
        with pytest.raises(ValueError, match=f"Access has no value {number}"):
            serialization.decode(flag(Access.READ, number))
    assert (reachable(Access), reachable(Bits)) == held
    assert made == []


@dataclasses.dataclass
class Usual:
    x: Any
    y: Any = 0


@dataclasses.dataclass
class Catch:
    """As long a name as that of `Usual`."""

    x: Any
    y: Any = 0

    def __del__(self) -> None:
        made.append("dropped")


@dataclasses.dataclass
class Setup:
    """Another such class."""

    x: Any
    y: Any = 0


def _set(self: Setup, value: object) -> None:
    made.append(value)


Setup.y = property(lambda self: 0, _set)  # type: ignore[assignment]  # a descriptor in place of the field


class Drops(NamedTuple):
    x: Any

    def __del__(self) -> None:
        made.append("dropped")


class Holds(NamedTuple):
    """As long a name as that of `Drops`."""

    x: Any


@pytest.mark.parametrize(
    ("cls", "like", "code"),
    [(Catch, Usual(1), "__del__"), (Setup, Usual(1), "the setter of y"), (Drops, Holds(1), "__del__")],
)
def test_type_with_custom_code_must_be_registered(
    monkeypatch: pytest.MonkeyPatch, cls: type[Any], like: Any, code: str
) -> None:
    monkeypatch.setattr(serialization.classes, "_registered", {})
    data = serialization.encode(like).replace(type(like).__name__.encode(), cls.__name__.encode())
    value = cls(1)
    made.clear()
    with pytest.raises(TypeError, match=f"{cls.__name__}, which runs {code} .* unisono.serialization.register"):
        serialization.encode(value)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{cls.__name__} runs {code} .* unisono.serialization.register"):
            serialization.decode(data)
    assert made == []
    serialization.register(cls)
    assert serialization.decode(data).x == serialization.decode(serialization.encode(value)).x == 1


@pytest.mark.parametrize("name", ["os:system", "xml.dom.minidom:Node", "builtins:int", "subprocess:Popen", ":", "test"])
@pytest.mark.parametrize("kind", b"DPEG")
def test_decoding_creates_no_class_and_imports_no_module(name: str, kind: int) -> None:
    before = set(sys.modules)
    text = f"{name}()" if kind == ord("D") else name
    data = (
        bytes([kind])
        + serialization.encode(text)
        + (serialization.encode(()) if kind in b"DP" else serialization.encode(1))[1:]
    )
    with pytest.raises(ValueError, match="hold no value"):
        serialization.decode(data)
    assert set(sys.modules) == before


def test_depth_is_limited() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="100 levels"):
        serialization.encode(loop)
    deep: Any = 1
    for _ in range(serialization.MAX_DEPTH):
        deep = [deep]
    assert serialization.decode(serialization.encode(deep)) == deep
    with pytest.raises(ValueError, match="100 levels"):
        serialization.decode(b"l\x01" * 5000 + b"N")
    with pytest.raises(ValueError, match="100 levels"):
        serialization.decode(b"d\x01" * 5000 + b"N")


@given(values | tensors, st.data())
def test_damaged_bytes_are_a_value_or_a_value_error(value: Any, data: st.DataObject) -> None:
    good = serialization.encode(value)
    cut = data.draw(st.integers(0, len(good) - 1))
    with pytest.raises(ValueError, match="hold no value"):
        serialization.decode(good[:cut])
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
    _decode_or_refuse(bytes(bad))


@given(st.binary())
@example(
    b"A" + serialization.encode("float32") + b"\x02" + serialization.encode(0) + serialization.encode(2**62) + b"\x00"
)
@example(b"A" + serialization.encode("qint8") + b"\x00\x01\x00")
@example(b"M" + serialization.encode("O") + b"\x00\x00")
@example(b"M" + serialization.encode("i4,i4") + b"\x00\x00")
@example(b"R\x03" + serialization.encode(0) + serialization.encode(1) + serialization.encode(0))
@example(b"S\x01l\x00")
@example(b"V" + serialization.encode("no such device"))
def test_random_bytes_are_a_value_or_a_value_error(data: bytes) -> None:
    # What is refused as bytes is refused as a view, and what is read is of a kind that can be written again.
    assert _decode_or_refuse(data) == _decode_or_refuse(memoryview(data))


def _decode_or_refuse(data: Any) -> str:
    try:
        return type(serialization.decode(data)).__name__
    except ValueError:
        return "refused"


@pytest.mark.parametrize("kind", "lsbBItSZdO")
def test_huge_count_costs_no_memory(kind: str) -> None:
    data = kind.encode() + b"\xff" + struct.pack("<Q", 2**40) + b"N" * 100
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="end too early"):
            serialization.decode(data)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
