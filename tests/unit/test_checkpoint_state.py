"""What goes in comes out: every kind of value, dtype and object, in place, on as many ranks as you like."""

from __future__ import annotations

import json
import math
import pickle
import random
import string
import struct
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import unisono as un
from unisono.checkpoint import RNG, CorruptError, PerRank, StateError
from unisono.checkpoint.dtypes import as_bytes
from unisono.checkpoint.layout import shares
from unisono.checkpoint.tree import Packer, unpack
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
def test_values_come_back_as_they_were(value: Any) -> None:
    packer = Packer()
    tree = json.loads(json.dumps(packer.pack(value)))
    assert alike(unpack(tree, packer.tensors.__getitem__), value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=8)
@given(value=st.dictionaries(st.text(string.printable + "$@", min_size=1), values, max_size=4))
def test_values_survive_a_file(tmp_path: Path, value: dict[str, Any]) -> None:
    un.checkpoint.save(tmp_path, value)
    assert alike(un.checkpoint.load(tmp_path), value)


def test_numbers_that_are_none(tmp_path: Path) -> None:
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
    with un.checkpoint.open(tmp_path) as archive:
        for name, tensor in state.items():
            assert torch.equal(as_bytes(archive[name]), as_bytes(tensor)), name


def test_memory_of_every_form(tmp_path: Path) -> None:
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


def test_the_files_are_safetensors(tmp_path: Path) -> None:
    state = {"a": torch.randn(50, 60), "b": torch.arange(7), "c": torch.tensor(1j)}
    un.checkpoint.save(tmp_path, state)
    (file,) = tmp_path.glob("*.safetensors")
    found = load_file(file)
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
        ({"s": torch.eye(2).to_sparse()}, "'s' is a tensor of torch.sparse_coo"),
        ({"m": torch.empty(2, device="meta")}, "'m' is on the meta device"),
        ({"n": np.array(["text"])}, "'n' is a numpy array of"),
        ({"f": len}, "'f' is a builtins.builtin_function_or_method"),
    ],
)
def test_what_cannot_be_saved_is_named_on_all_ranks(tmp_path: Path, value: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        un.checkpoint.save(tmp_path / "x", value)

    def program(comm: un.Communicator) -> None:
        un.checkpoint.save(tmp_path / "x", value if comm.rank == 1 else {}, comm)

    errors = run_ranks(program, 2, on_failure="continue")
    assert [type(error) for error in errors] == [TypeError] * 2
    assert "rank 1 of 2" in str(errors[0])
    assert not (tmp_path / "x").exists()


def test_a_state_that_contains_itself(tmp_path: Path) -> None:
    state: dict[str, Any] = {}
    state["me"] = state
    with pytest.raises(ValueError, match="contains itself"):
        un.checkpoint.save(tmp_path, state)


# -- objects -----------------------------------------------------------------------------------


def trained(optimizer: type[torch.optim.Optimizer], steps: int, **options: Any) -> dict[str, Any]:
    """A model with all that belongs to its training."""
    torch.manual_seed(steps)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 2))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer(model.parameters(), lr=0.1, **options)}
    state["scheduler"] = torch.optim.lr_scheduler.MultiStepLR(state["optimizer"], [2, 3])
    state["average"] = torch.optim.swa_utils.AveragedModel(model)
    state["scaler"] = torch.amp.GradScaler("cpu")
    state |= {"rng": RNG(), "generator": torch.Generator().manual_seed(steps), "losses": [], "best": 0.0}
    for _ in range(steps):
        train(state)
    return state


def train(state: dict[str, Any]) -> None:
    loss = state["model"](torch.randn(8, 6)).square().mean()
    state["optimizer"].zero_grad()
    loss.backward()
    state["optimizer"].step()
    state["scheduler"].step()
    state["average"].update_parameters(state["model"])
    state["losses"].append(loss.item() + random.random() + float(torch.rand(1, generator=state["generator"])))


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Rprop, {}),
    ],
)
def test_training_goes_on_as_if_it_had_never_stopped(tmp_path: Path, optimizer: Any, options: Any) -> None:
    state = trained(optimizer, 4, **options)
    un.checkpoint.save(tmp_path, state)
    for _ in range(3):
        train(state)
    for fresh in (trained(optimizer, 0, **options), trained(optimizer, 2, **options)):
        weight = fresh["model"][0].weight
        assert un.checkpoint.load(tmp_path, fresh) is fresh
        assert fresh["model"][0].weight is weight
        for _ in range(3):
            train(fresh)
        assert fresh["losses"] == state["losses"]
        for name, tensor in state["model"].state_dict().items():
            assert torch.equal(fresh["model"].state_dict()[name], tensor), name
        for name, tensor in state["average"].state_dict().items():
            assert torch.equal(fresh["average"].state_dict()[name], tensor), name


def test_lbfgs_and_tied_weights(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
        model[1].weight = model[0].weight
        return model, torch.optim.LBFGS(model.parameters(), max_iter=3)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.tensor([1, 2])).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    model, optimizer = make()
    step(model, optimizer)
    un.checkpoint.save(tmp_path, {"model": model, "optimizer": optimizer})
    other, restored = make()
    un.checkpoint.load(tmp_path, {"model": other, "optimizer": restored})
    for both in ((model, optimizer), (other, restored)):
        step(*both)
    assert torch.equal(model[0].weight, other[0].weight)
    assert other[0].weight is other[1].weight


def test_the_wrong_model_changes_nothing(tmp_path: Path) -> None:
    un.checkpoint.save(tmp_path, {"net": nn.Linear(3, 2), "step": 9})
    wrong = nn.Sequential(nn.Linear(3, 2))
    before = wrong[0].weight.clone()
    with pytest.raises(
        StateError, match=r"has 'net.bias', 'net.weight'|has 'net.weight', 'net.bias', which the state lacks"
    ):
        un.checkpoint.load(tmp_path, {"net": wrong})
    with pytest.raises(StateError, match=r"'net.weight' has shape \(2, 3\) in it, \(4, 3\) here"):
        un.checkpoint.load(tmp_path, {"net": nn.Linear(3, 4)})
    with pytest.raises(StateError, match="lacks 'optimizer', which the state has"):
        un.checkpoint.load(tmp_path, {"optimizer": torch.optim.SGD(wrong.parameters())})
    assert torch.equal(wrong[0].weight, before)
    target = {"net": nn.Linear(3, 2, bias=False), "step": 0}
    assert un.checkpoint.load(tmp_path, target, strict=False)["step"] == 9
    partial = {"step": 0}
    assert un.checkpoint.load(tmp_path, partial) == {"step": 9}


def test_an_optimizer_of_other_groups(tmp_path: Path) -> None:
    net = nn.Linear(3, 2)
    un.checkpoint.save(tmp_path, {"optimizer": torch.optim.Adam(net.parameters())})
    other = torch.optim.Adam([{"params": [net.weight]}, {"params": [net.bias]}])
    with pytest.raises(StateError, match=r"groups of \[2\] parameters in it, of \[1, 1\] here"):
        un.checkpoint.load(tmp_path, {"optimizer": other})


def test_other_dtypes_are_converted_and_meta_modules_filled(tmp_path: Path) -> None:
    net = nn.Linear(3, 2)
    un.checkpoint.save(tmp_path, net)
    double = un.checkpoint.load(tmp_path, nn.Linear(3, 2, dtype=torch.float64))
    assert torch.equal(double.weight, net.weight.double())
    with torch.device("meta"):
        empty = nn.Linear(3, 2)
    assert torch.equal(un.checkpoint.load(tmp_path, empty).weight, net.weight)
    assert isinstance(empty.weight, nn.Parameter)


def test_map_location(tmp_path: Path) -> None:
    un.checkpoint.save(tmp_path, {"w": torch.ones(2)})
    asked = []

    def function(storage: Any, location: str) -> Any:
        asked.append(location)
        return storage

    for where in (None, "cpu", torch.device("cpu"), {"cuda:0": "cuda:1"}, function, lambda storage, location: None):
        assert un.checkpoint.load(tmp_path, map_location=where)["w"].device.type == "cpu"
    assert asked == ["cpu"]
    assert un.checkpoint.load(tmp_path, map_location="meta")["w"].is_meta
    assert un.checkpoint.load(tmp_path, map_location={"cpu": "meta"})["w"].is_meta


# -- shares ------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 50_000), st.sampled_from([1, 2, 4, 8, 16])), max_size=20),
    st.integers(1, 17),
)
def test_shares_cover_and_balance(sizes: list[tuple[int, int]], ranks: int) -> None:
    tensors = [(f"t{i}", count * item, item) for i, (count, item) in enumerate(sizes)]
    given_out = shares(tensors, ranks)
    assert len(given_out) == ranks
    found: dict[str, list[tuple[int, int]]] = {name: [] for name, _, _ in tensors}
    for part in given_out:
        start = 0
        for piece in part:
            item = {name: item for name, _, item in tensors}[piece.name]
            assert start % item == piece.start % item == piece.stop % item == 0
            start += piece.stop - piece.start
            found[piece.name].append((piece.start, piece.stop))
    for name, nbytes, _ in tensors:
        assert [start for start, _ in found[name]] == [0, *(stop for _, stop in found[name][:-1])]
        assert found[name][-1][1] == nbytes
    loads = [sum(piece.stop - piece.start for piece in part) for part in given_out]
    assert max(loads) - sum(loads) / ranks <= 4096 + 16


# -- each rank's own ---------------------------------------------------------------------------


def own(comm: un.Communicator, path: str, elsewhere: Any) -> Any:
    un.checkpoint.save(path, {"mine": PerRank({"r": comm.rank, "t": torch.full((2,), comm.rank)}, elsewhere)}, comm)


def taken(comm: un.Communicator, path: str, elsewhere: Any) -> Any:
    state = un.checkpoint.load(path, {"mine": PerRank({"r": -1, "t": torch.zeros(2)}, elsewhere)}, comm)
    obj = state["mine"].obj
    return obj["r"], int(obj["t"][0])


@pytest.mark.parametrize(("saved", "loaded"), [(2, 2), (3, 1), (2, 4), (1, 3)])
def test_per_rank_state_goes_to_other_numbers_of_ranks(tmp_path: Path, saved: int, loaded: int) -> None:
    for elsewhere in ("modulo", "shared"):
        run_ranks(own, saved, "thread", str(tmp_path), elsewhere)
        assert run_ranks(taken, loaded, "thread", str(tmp_path), elsewhere) == [(r % saved,) * 2 for r in range(loaded)]
    run_ranks(own, saved, "thread", str(tmp_path), "keep")
    kept = [(r, r) if r < saved else (-1, 0) for r in range(loaded)]
    assert run_ranks(taken, loaded, "thread", str(tmp_path), "keep") == kept
    run_ranks(own, saved, "thread", str(tmp_path), "refuse")
    if saved == loaded:
        assert run_ranks(taken, loaded, "thread", str(tmp_path), "refuse") == kept
    else:
        with pytest.raises(StateError, match=f"each of the {saved} ranks"):
            run_ranks(taken, loaded, "thread", str(tmp_path), "refuse")


class Sampler(torch.utils.data.Sampler[int]):
    """Differs from rank to rank, and says so by being a sampler."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, int]:
        return {"rank": self.rank}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.rank = state["rank"]


def test_samplers_generators_and_codecs_need_no_word(tmp_path: Path) -> None:
    def state_of(rank: int) -> dict[str, Any]:
        codec = un.compression.error_feedback(un.compression.onebit)
        return {"sampler": Sampler(rank), "generator": torch.Generator().manual_seed(rank), "codec": codec}

    def program(comm: un.Communicator) -> tuple[int, bool]:
        un.checkpoint.save(tmp_path, state_of(comm.rank), comm)
        state = un.checkpoint.load(tmp_path, state_of(9), comm)
        return state["sampler"].rank, torch.equal(
            state["generator"].get_state(), state_of(comm.rank)["generator"].get_state()
        )

    assert run_ranks(program, 3) == [(0, True), (1, True), (2, True)]


def test_errors_travel_and_say_where() -> None:
    error = CorruptError("damaged: 'w'", path="runs/7", tensors=["w"], rank=1, size=4)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is CorruptError
    assert (str(copy), copy.tensors, copy.path) == (str(error), ("w",), "runs/7")
    assert str(error) == "rank 1 of 4: checkpoint runs/7: damaged: 'w'"
