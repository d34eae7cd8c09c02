"""Values survive the way through bytes; bytes that are no value end in ValueError and nothing else."""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
import struct
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given
from meta_tensors import Hollow

from unisono import serialization


class Colour(enum.Enum):
    RED = "r"
    BLUE = ("b", 2)


class Right(enum.Flag):
    READ = 1
    WRITE = 2


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


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Plain:
    x: Any
    y: Any = 0

    def __post_init__(self) -> None:
        if self.x == "explode":
            raise AssertionError("a constructor was run")


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any


numbers = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
words = st.text(st.characters()) | st.binary() | st.binary().map(bytearray)
hashable = st.recursive(
    numbers | st.text() | st.binary() | st.sampled_from([*Colour, Right.READ | Right.WRITE, Right(0)]),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3) | st.builds(Frozen, inner),
    max_leaves=5,
)
optional = st.none() | st.integers()
values = st.recursive(
    hashable
    | words
    | st.sampled_from([torch.float16, torch.device("cuda:3"), torch.Size([2, 0])])
    | st.slices(10)
    | st.builds(slice, optional, st.text(), optional)
    | st.builds(range, st.integers(), st.integers(), st.integers(1)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.sets(hashable, max_size=4)
        | st.dictionaries(hashable, inner, max_size=4)
        | st.dictionaries(st.text(), inner, max_size=4).map(collections.OrderedDict)
        | st.builds(Plain, inner, inner)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=12,
)
tensors = st.builds(
    lambda dtype, shape: torch.arange(math.prod(shape)).to(dtype).reshape(shape),
    st.sampled_from(
        [torch.float32, torch.bfloat16, torch.int8, torch.uint16, torch.bool, torch.complex64, torch.int64]
    ),
    st.lists(st.integers(0, 3), max_size=3),
)


@given(values)
def test_round_trip(value: Any) -> None:
    back = serialization.decode(serialization.encode(value))
    assert type(back) is type(value)
    assert back == value
    # 1, 1.0 and True are equal, but are not the same.
    assert serialization.encode(back) == serialization.encode(value)


def test_nan() -> None:
    back = serialization.decode(serialization.encode((math.nan, complex(math.nan, -0.0))))
    assert math.isnan(back[0])
    assert math.copysign(1, back[1].imag) == -1


@given(tensors)
def test_tensors(tensor: torch.Tensor) -> None:
    back = serialization.decode(serialization.encode(tensor))
    assert back.dtype == tensor.dtype
    assert torch.equal(back, tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t()[1:],
        torch.randn(2, 2, dtype=torch.complex64).conj(),
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.tensor(3),
        torch.arange(5).expand(2, 5),
    ],
)
def test_tensor_subclass_is_dropped(tensor: torch.Tensor) -> None:
    back = serialization.decode(serialization.encode([tensor]))[0]
    assert type(back) is torch.Tensor
    assert not back.requires_grad
    assert back.is_contiguous()
    assert back.dtype == tensor.dtype
    assert back.tolist() == tensor.tolist()


def test_numpy() -> None:
    np = pytest.importorskip("numpy")
    for value in (
        np.arange(6.0).reshape(2, 3),
        np.zeros((0, 4)),
        np.array(3),
        np.array(["ab"]),
        np.float32(2),
        np.int8(1),
    ):
        back = serialization.decode(serialization.encode(value))
        assert type(back) is type(value)
        assert back.dtype == value.dtype
        assert np.array_equal(back, value)
    with pytest.raises(TypeError, match=r"value\[0\] is a MaskedArray, which would arrive as a plain numpy array"):
        serialization.encode([np.ma.masked_array([1.0, 2.0], mask=[True, False])])


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
    held = len(Access._value2member_map_), len(Bits._value2member_map_)
    assert serialization.decode(flag(Access.READ, 3)) is known
    both, none, high = (serialization.decode(flag(*of)) for of in ((Access.READ, 6), (Access.READ, 0), (Bits.LOW, 12)))
    assert (type(both), both.value, both.name, Access.RUN in both) == (Access, 6, "WRITE|RUN", True)
    assert (both & Access.RUN, bool(none), none.value) == (Access.RUN, False, 0)
    assert (type(high), high, hash(high), Bits.HIGH in high, high.name) == (Bits, 12, hash(12), True, "HIGH|8")
    for number in (8, -1):
        with pytest.raises(ValueError, match=f"Access has no value {number}"):
            serialization.decode(flag(Access.READ, number))
    assert (len(Access._value2member_map_), len(Bits._value2member_map_)) == held
    assert made == []


@dataclasses.dataclass
class Catch:
    """As long a name as that of `Plain`."""

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
    [(Catch, Plain(1), "__del__"), (Setup, Plain(1), "the setter of y"), (Drops, Holds(1), "__del__")],
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


def test_equal_sets_have_equal_bytes() -> None:
    up, down = set(range(0, 24, 8)), set(range(16, -8, -8))
    assert list(up) != list(down)
    assert serialization.encode(up) == serialization.encode(down)


class Unlisted(Plain):
    """No dataclass itself: fields of its own would be lost."""


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            [1, (2, {"x": lambda: 0})],
            r"value\[1\]\[1\]\['x'\] is the function .*<lambda>; send plain values .* trusted=True",
        ),
        ({1: {2: threading.Lock()}}, r"value\[1\]\[2\] is a _thread.lock"),
        (Plain([object()]), r"value.x\[0\] is a object"),
        (Unlisted(1), "is a .*Unlisted"),
        ({1, int}, r"value\[0\] is the type int"),
        (torch.ones(2).to_sparse(), "is a torch.sparse_coo tensor"),
        (torch.ones(2, device="meta"), "is a meta tensor"),
        ({"w": Hollow(torch.ones(2))}, r"value\['w'\] is a Hollow, whose elements are not in its own memory"),
        (dataclasses.make_dataclass("Made", ["x"], namespace={"__module__": "nowhere"})(1), "serialization.register"),
    ],
)
def test_unsendable_value_is_named(value: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        serialization.encode(value)


def test_local_classes_can_be_registered() -> None:
    @dataclasses.dataclass
    class Local:
        x: int

    with pytest.raises(TypeError, match="Local"):
        serialization.encode(Local(1))
    assert serialization.register(Local) is Local
    assert serialization.decode(serialization.encode(Local(1))) == Local(1)
    with pytest.raises(TypeError, match="not a dataclass"):
        serialization.register(int)


def test_main_has_two_names(monkeypatch: pytest.MonkeyPatch) -> None:
    main = type(sys)("__mp_main__")
    cls = dataclasses.make_dataclass("InMain", ["x"])
    cls.__module__ = "__mp_main__"
    main.InMain = cls  # type: ignore[attr-defined]  # a new name in the module
    monkeypatch.setitem(sys.modules, "__mp_main__", main)
    data = serialization.encode(cls(5))
    assert b"__main__:InMain" in data
    assert serialization.decode(data).x == 5


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


def test_torch_is_not_imported_to_send_plain_values() -> None:
    # An empty package instead of unisono, whose __init__ may import torch.
    package = Path(serialization.__file__).parents[1]
    code = (
        "import sys, types; m = sys.modules['unisono'] = types.ModuleType('unisono'); "
        f"m.__path__ = [{str(package)!r}]; from unisono.serialization import encode, decode; "
        "assert decode(encode([1, 'a'])) == [1, 'a']; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
