"""Values survive the way through bytes, and a value that cannot is named."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from meta_tensors import Hollow
from serialization_values import Plain, tensors, values

from unisono import serialization


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


def test_torch_is_not_imported_to_send_plain_values() -> None:
    # An empty package instead of unisono, whose __init__ may import torch.
    package = Path(serialization.__file__).parents[1]
    code = (
        "import sys, types; m = sys.modules['unisono'] = types.ModuleType('unisono'); "
        f"m.__path__ = [{str(package)!r}]; from unisono.serialization import encode, decode; "
        "assert decode(encode([1, 'a'])) == [1, 'a']; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0
