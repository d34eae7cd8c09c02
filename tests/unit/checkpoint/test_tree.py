"""Round trips of every kind of value and dtype, and every memory layout."""

from __future__ import annotations

import json
import math
import string
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from enum import Enum, Flag, IntEnum, auto
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses import FakeTensorMode

import unisono as un
from unisono.checkpoint.tree import Packer, as_bytes, unpack
from unisono.testing import run_ranks

DTYPES = sorted({d for n in dir(torch) if isinstance(d := getattr(torch, n), torch.dtype)}, key=str)
PLAIN = [d for d in DTYPES if not str(d).startswith(("torch.q", "torch.bits", "torch.int1", "torch.uint1"))]
SAVABLE = [d for d in PLAIN if str(d).removeprefix("torch.") not in {f"{s}int{n}" for s in ("", "u") for n in range(8)}]

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.just(torch.bfloat16)
    | st.just(torch.Size([2, 3]))
    | st.just(range(1, 9, 2))
    | st.builds(torch.device, st.just("cuda:1")),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers(), st.text()), inner)
        | st.dictionaries(st.text(), inner).map(OrderedDict)
        | st.sets(st.integers() | st.text())
        | st.frozensets(st.binary())
        | st.dictionaries(st.text(), st.integers()).map(Counter)
        | st.lists(st.integers(-(2**63), 2**63 - 1), min_size=64, max_size=70)
        | st.lists(st.floats(allow_nan=False), min_size=64, max_size=70).map(tuple)
    ),
    max_leaves=15,
)


def alike(one: Any, other: Any) -> bool:
    """Equal, of the same types all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    return bool(one == other)


@settings(max_examples=25)
@given(values)
def test_values_round_trip(value: Any) -> None:
    packer = Packer()
    tree = json.loads(json.dumps(packer.pack(value)))
    assert alike(unpack(tree, packer.tensors.__getitem__), value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=8)
@given(value=st.dictionaries(st.text(string.printable + "$@", min_size=1), values, max_size=4))
def test_values_round_trip_through_a_file(tmp_path: Path, value: dict[str, Any]) -> None:
    un.checkpoint.save(tmp_path, value)
    assert alike(un.checkpoint.load(tmp_path), value)


def test_nan_and_infinity(tmp_path: Path) -> None:
    un.checkpoint.save(tmp_path, [math.nan, math.inf, -math.inf, -0.0, 2**200])
    nan, *rest = un.checkpoint.load(tmp_path)
    assert math.isnan(nan)
    assert alike(rest, [math.inf, -math.inf, -0.0, 2**200])


def sample(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Some bits of this dtype."""
    size = math.prod(shape) * dtype.itemsize
    flat = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8)
    return flat.view(dtype).view(shape)


def test_every_dtype_and_shape(tmp_path: Path) -> None:
    state = {f"{d}{list(s)}": sample(d, s) for d in SAVABLE for s in [(), (0, 3), (5,), (3, 4), (1, 1, 2)]}
    assert len(state) >= 90
    un.checkpoint.save(tmp_path, state)
    loaded = un.checkpoint.load(tmp_path)
    for name, tensor in state.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(as_bytes(loaded[name]), as_bytes(tensor)), name
    with un.checkpoint.open_archive(tmp_path) as archive:
        for name, tensor in state.items():
            assert torch.equal(as_bytes(archive[name]), as_bytes(tensor)), name


def test_every_memory_layout(tmp_path: Path) -> None:
    base = torch.arange(60.0).view(6, 10)
    state = {
        "strided": base[::2, 1::3],
        "turned": base.t(),
        "spread": torch.ones(1).expand(4, 5),
        "conjugate": torch.tensor([1 + 2j, 3j]).conj(),
        "negative": torch.tensor([1 + 2j, 3j]).conj().imag,
        "last": base.view(1, 6, 5, 2).to(memory_format=torch.channels_last),
        "parameter": nn.Parameter(torch.ones(3)),
    }
    un.checkpoint.save(tmp_path, state)
    for name, tensor in un.checkpoint.load(tmp_path).items():
        assert torch.equal(tensor, state[name]), name
    targets = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    targets["strided"] = torch.zeros(6, 10)[::2, 1::3]
    targets["spread"] = torch.zeros(8, 5)[::2]
    before = dict(targets)
    un.checkpoint.load(tmp_path, targets)
    for name, tensor in state.items():
        assert targets[name] is before[name]
        assert torch.equal(targets[name], tensor), name


def test_shared_tensors_stay_shared_and_are_stored_once(tmp_path: Path) -> None:
    weight = torch.randn(100, 100)
    un.checkpoint.save(tmp_path, {"one": weight, "other": [weight, weight.view(100, 100)]})
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 1.5 * weight.nbytes
    loaded = un.checkpoint.load(tmp_path)
    assert loaded["one"] is loaded["other"][0]
    apart = un.checkpoint.load(tmp_path, {"one": torch.zeros(100, 100), "other": [torch.zeros(100, 100), None]})
    assert torch.equal(apart["one"], weight)
    assert torch.equal(apart["other"][0], weight)


def test_files_are_safetensors(tmp_path: Path) -> None:
    state = {"a": torch.randn(50, 60), "b": torch.arange(7), "c": torch.tensor(1j)}
    un.checkpoint.save(tmp_path, state)
    (file,) = tmp_path.glob("*.safetensors")
    found = pytest.importorskip("safetensors.torch", reason="reads with safetensors").load_file(file)
    assert torch.equal(found["a"], state["a"])
    assert torch.equal(found["b"], state["b"])
    assert found["c"].tolist() == [0.0, 1.0]


def test_numpy(tmp_path: Path) -> None:
    state = {
        "array": np.arange(6, dtype=">i4").reshape(2, 3)[:, ::-1],
        "scalar": np.float32(0.5),
        "flag": np.bool_(True),
    }
    un.checkpoint.save(tmp_path, state)
    loaded = un.checkpoint.load(tmp_path)
    assert loaded["array"].tolist() == [[2, 1, 0], [5, 4, 3]]
    assert (loaded["scalar"], type(loaded["scalar"])) == (0.5, np.float32)
    assert type(loaded["flag"]) is np.bool_


class Unsavable:
    pass


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": [1, Unsavable()]}, r"'a.1' is a .*Unsavable, which cannot be saved"),
        ({"h": FakeTensorMode().from_tensor(torch.ones(2))}, "'h' is a FakeTensor, whose elements are not in its own"),
        ({"s": torch.eye(2).to_sparse()}, "'s' is a tensor of torch.sparse_coo"),
        ({"m": torch.empty(2, device="meta")}, "'m' is on the meta device"),
        ({"n": np.array(["text"])}, "'n' is a numpy array of"),
        ({"n": np.ma.array([1.0, 2.0], mask=[0, 1])}, "'n' is a masked array, which would lose its mask"),
        ({"f": len}, "'f' is a builtins.builtin_function_or_method"),
    ],
)
def test_unsaveable_value_is_named_on_all_ranks(tmp_path: Path, value: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        un.checkpoint.save(tmp_path / "x", value)

    def program(comm: un.Communicator) -> None:
        un.checkpoint.save(tmp_path / "x", value if comm.rank == 1 else {}, comm)

    errors = run_ranks(program, 2, on_failure="continue")
    assert [type(error) for error in errors] == [TypeError] * 2
    assert "rank 1 of 2" in str(errors[0])
    assert not (tmp_path / "x").exists()


def test_self_referential_state(tmp_path: Path) -> None:
    state: dict[str, Any] = {}
    state["me"] = state
    with pytest.raises(ValueError, match="contains itself"):
        un.checkpoint.save(tmp_path, state)


# Each needs more memory than the 16 MiB granted beyond what the manifest's own bytes allow.
@pytest.mark.parametrize("count", [900, pytest.param(12_500, marks=pytest.mark.soak)])
def test_number_of_small_tensors_is_not_limited(tmp_path: Path, count: int) -> None:
    model = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(count))
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    un.checkpoint.save(tmp_path, {"model": model, "optimizer": optimizer})
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
        optimizer.state[parameter]["exp_avg"].zero_()
    un.checkpoint.load(tmp_path, {"model": model, "optimizer": optimizer})
    for parameter, value in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter, value)
        assert bool((optimizer.state[parameter]["exp_avg"] > 0).all())


def test_tensors_without_elements_or_dimensions_are_not_limited(tmp_path: Path) -> None:
    state = {str(number): torch.zeros(()) if number % 2 else torch.zeros(0) for number in range(7_600)}
    un.checkpoint.save(tmp_path, state)
    loaded = un.checkpoint.load(tmp_path)
    assert [loaded[name].shape for name in state] == [tensor.shape for tensor in state.values()]


class Mode(Enum):
    TRAIN = "train"
    TEST = "test"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Parts(Flag):
    A = auto()
    B = auto()


class Point(NamedTuple):
    x: float
    y: torch.Tensor


Pair = namedtuple("Pair", ["first", "second"])


class Holder:
    """An object that keeps what it loads."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


def odd_values() -> dict[str, Any]:
    class Local(Enum):
        ONE = 1

    counts = defaultdict(list, a=[1], b=[])
    nested = defaultdict(int, {3: 4})
    return {
        "enum": Mode.TEST,
        "int enum": Level.HIGH,
        "flag": Parts.A | Parts.B,
        "named": Point(1.5, torch.ones(2)),
        "pair": Pair((1, 2), [Mode.TRAIN]),
        "default": counts,
        "default of numbers": nested,
        "ordered": OrderedDict(z=1, a=2),
        "counter": Counter("aab"),
        "keys": {Level.LOW: "low", (1, 2): "tuple"},
        "set": {Level.LOW, Level.HIGH},
        "local": Local.ONE,
    }


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        assert getattr(found, "default_factory", 0) == getattr(expected, "default_factory", 0)
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, (list, tuple)):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize("before", ["the same", "others", "nothing"])
def test_types_survive_in_the_state_of_an_object(tmp_path: Path, before: str) -> None:
    saved = odd_values()
    un.checkpoint.save(tmp_path, {"holder": Holder(**saved)})
    others = {"enum": Mode.TRAIN, "named": Point(0.0, torch.zeros(2)), "default": defaultdict(list), "flag": Parts.A}
    target = Holder(**({"the same": saved, "others": others, "nothing": {}}[before]))
    un.checkpoint.load(tmp_path, {"holder": target})
    if before != "the same":
        # A class within a function cannot be found: its value is what remains.
        assert target.values.pop("local") == saved.pop("local").value
    assert_same(target.values, saved)


def test_default_factory_of_the_target_is_kept(tmp_path: Path) -> None:
    un.checkpoint.save(tmp_path, {"holder": Holder(found=defaultdict(lambda: 7, a=1))})
    target = Holder(found=defaultdict(lambda: 8))
    un.checkpoint.load(tmp_path, {"holder": target})
    assert dict(target.values["found"]) == {"a": 1}
    assert target.values["found"]["other"] == 8


@pytest.mark.parametrize(
    "node",
    [
        {"$enum": ["os", "system", "TRAIN", "kept"]},
        {"$enum": ["no.such.module", "Mode", "TRAIN", "kept"]},
        {"$enum": [__name__, "Mode", "NONE", "kept"]},
    ],
)
def test_class_that_is_no_enum_is_not_touched(node: Any) -> None:
    assert unpack(node, lambda name: torch.zeros(0)) == "kept"


def test_class_that_is_no_named_tuple_is_not_touched() -> None:
    for place in ("os", "system"), ("builtins", "tuple"), (__name__, "Pair"):
        found = unpack({"$named": [*place, [1]]}, lambda name: torch.zeros(0))
        assert (type(found), found) == (tuple, (1,))
