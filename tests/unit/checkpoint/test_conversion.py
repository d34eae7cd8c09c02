"""Conversion from and to other formats, by function and from the command line; and the ported example."""

from __future__ import annotations

import importlib.util
import io
import os
import pickle
import pkgutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono as un
from unisono.checkpoint import CorruptError, FormatError
from unisono.checkpoint.conversion import convert, read_any
from unisono.errors import UnavailableError
from unisono.testing import run_ranks
from unisono.tools.cli import main

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "ddp_checkpoint.py"


def state() -> dict[str, Any]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 7,
        "name": "x",
        "h": torch.ones(2).bfloat16(),
    }


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return {str(k) for k in one} == {str(k) for k in other} and all(
            alike(one[k], other[k] if k in other else other[str(k)]) for k in one
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@pytest.mark.parametrize("name", ["a.pt", "a.dcp", "a"])
def test_round_trip(tmp_path: Path, name: str) -> None:
    whole = state()
    un.checkpoint.save(tmp_path / "first", whole)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        convert(tmp_path / "first", tmp_path / name)
        convert(tmp_path / name, tmp_path / "last")
    last = un.checkpoint.load(tmp_path / "last")
    assert alike(whole, last)
    fresh = torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=1.0, momentum=0.5)
    un.checkpoint.load(tmp_path / "last", {"optimizer": fresh})
    assert alike(fresh.state_dict(), whole["optimizer"])


def test_safetensors_names_are_paths(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.torch", reason="converts to safetensors")
    whole = state()
    un.checkpoint.save(tmp_path / "first", whole)
    convert(tmp_path / "first", tmp_path / "a.safetensors")
    assert torch.equal(package.load_file(tmp_path / "a.safetensors")["model.weight"], whole["model"]["weight"])
    package.save_file({"w": torch.ones(2)}, tmp_path / "b.safetensors")
    convert(tmp_path / "b.safetensors", tmp_path / "b")
    assert un.checkpoint.load(tmp_path / "b")["w"].tolist() == [1.0, 1.0]


def test_per_rank_state_is_exported_whole(tmp_path: Path) -> None:
    big = torch.randn(40_000)
    run_ranks(
        lambda comm: un.checkpoint.save(tmp_path / "x", {"big": big, "r": un.checkpoint.PerRank(comm.rank)}, comm), 3
    )
    convert(tmp_path / "x", tmp_path / "x.pt")
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert torch.equal(found["big"], big)
    assert found["r"] == 0


def save_by_torch(state: Any, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def test_dcp_with_nested_lists(tmp_path: Path) -> None:
    nested = {"m": {"w": torch.arange(12.0).view(3, 4)}, "l": [1, torch.ones(2)]}
    save_by_torch(nested, tmp_path / "x.dcp")
    found = read_any(tmp_path / "x.dcp")
    assert torch.equal(found["m"]["w"], nested["m"]["w"])
    assert found["l"][0] == 1
    assert torch.equal(found["l"][1], torch.ones(2))


def test_dcp_written_by_an_older_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Before 3.11.4, members of enumerations are pickled so.
    kind: Any = pkgutil.resolve_name("torch.distributed.checkpoint.metadata:_MEM_FORMAT_ENCODING")
    monkeypatch.setattr(kind, "__reduce_ex__", lambda member, _protocol: (getattr, (kind, member.name)))
    save_by_torch({"w": torch.arange(5.0)}, tmp_path / "x.dcp")
    assert b"getattr" in (tmp_path / "x.dcp" / ".metadata").read_bytes()
    assert torch.equal(read_any(tmp_path / "x.dcp")["w"], torch.arange(5.0))


class Got:
    """An object pickled as an attribute of another one."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return getattr, self.arguments


@pytest.mark.parametrize("arguments", [(torch.Size, "__class__"), (torch.float32, "to_complex"), ("text", "format")])
def test_dcp_enumerations_are_restricted_to_members(tmp_path: Path, arguments: tuple[object, str]) -> None:
    (tmp_path / "x.dcp").mkdir()
    (tmp_path / "x.dcp" / ".metadata").write_bytes(pickle.dumps(Got(*arguments)))
    with pytest.raises(FormatError, match=f"{arguments[1]}' of .*, which does not belong there"):
        read_any(tmp_path / "x.dcp")


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_pickles_run_only_if_trusted(tmp_path: Path) -> None:
    torch.save({"x": Evil(tmp_path / "ran")}, tmp_path / "evil.pt")
    with pytest.raises(pickle.UnpicklingError, match="Weights only"):
        convert(tmp_path / "evil.pt", tmp_path / "out")
    (tmp_path / "evil.dcp").mkdir()
    (tmp_path / "evil.dcp" / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    for trusted in (False, True):
        with pytest.raises(FormatError, match=r"names \w+.mkdir, which does not belong there"):
            convert(tmp_path / "evil.dcp", tmp_path / "out", trusted=trusted)
    assert not (tmp_path / "ran").exists()
    convert(tmp_path / "evil.pt", tmp_path / "out", trusted=True)
    assert (tmp_path / "ran").exists()


def test_truncated_dcp_file(tmp_path: Path) -> None:
    save_by_torch({"w": torch.ones(100)}, tmp_path / "x.dcp")
    (file,) = (tmp_path / "x.dcp").glob("*.distcp")
    os.truncate(file, 50)
    with pytest.raises(CorruptError, match="ends before 'w' does"):
        read_any(tmp_path / "x.dcp")


def test_unknown_formats(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(io.BytesIO(b"words").getvalue())
    with pytest.raises(FormatError, match=r"no checkpoint in a known format \(dcp, safetensors, torch, unisono\)"):
        read_any(tmp_path / "x")
    with pytest.raises(ValueError, match="unknown checkpoint format 'zip'"):
        convert(tmp_path / "x", tmp_path / "y", to="zip")


# -- the command line --------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    un.checkpoint.save(tmp_path / "one", {"w": torch.ones(2, 3), "c": torch.ones(2) * 1j, "lr": 0.1}, extra={"step": 5})
    return tmp_path / "one"


def test_show(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "show", str(saved)]) == 0
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.split() == ["w", "float32", "2x3", "24", "B"]
    assert second.split() == ["c", "complex64", "2", "16", "B"]
    assert last.startswith("2 tensors, ")
    assert "saved by 1 ranks" in last
    assert "step 5" in last


def test_verify(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", str(saved)]) == 0
    assert "is whole: 2 tensors" in capsys.readouterr().out
    file = next(saved.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 128
    file.write_bytes(data)
    assert main(["checkpoint", "verify", str(saved)]) == 1
    assert "'w' has other bytes" in capsys.readouterr().err
    for action in ("show", "verify"):
        assert main(["checkpoint", action, str(saved / "nowhere")]) == 2
    assert "there is none" in capsys.readouterr().err
    assert main(["checkpoint", "show", str(saved.parent)]) == 2
    assert f"there is none; pass one in it, such as {saved}" in capsys.readouterr().err


def test_diff(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = {"w": torch.ones(2, 3), "c": torch.ones(3), "lr": 0.2, "more": torch.ones(1)}
    other["w"][1, 2] = 1.5
    run_ranks(lambda comm: un.checkpoint.save(tmp_path / "two", other, comm), 2)
    assert main(["checkpoint", "diff", str(saved), str(saved)]) == 0
    assert capsys.readouterr().out == "they hold the same\n"
    assert main(["checkpoint", "diff", str(saved), str(tmp_path / "two")]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "w: 1 of 6 elements differ, by up to 0.5",
        "c: torch.complex64 [2], torch.float32 [3]",
        "more: only in the second",
        "lr: 0.1, 0.2",
        'more (which tensor): (absent), {"$tensor": "more"}',
    ]


def test_convert(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "convert", str(saved), str(tmp_path / "x.pt")]) == 0
    assert torch.load(tmp_path / "x.pt", weights_only=True)["lr"] == 0.1
    assert main(["checkpoint", "convert", str(saved), str(tmp_path / "x.pt")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["checkpoint", "convert", str(saved), str(tmp_path / "y"), "--to", "torch"]) == 0
    assert (tmp_path / "y").is_file()


@pytest.mark.parametrize("ranks", [2, 4])
def test_ported_example(ranks: int) -> None:
    spec = importlib.util.spec_from_file_location("ddp_checkpoint", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    sums = example.main(ranks, "thread")
    assert len(sums) == ranks
    assert len(set(sums)) == 1


def test_conversion_without_safetensors_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    with pytest.raises(UnavailableError, match=r"needs safetensors: pip install"):
        convert(tmp_path / "x.pt", tmp_path / "y.safetensors")
    assert not (tmp_path / "y.safetensors").exists()


def test_tensors_with_equal_names_are_distinct(tmp_path: Path) -> None:
    torch.save({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}, tmp_path / "x.pt")
    with pytest.raises(FormatError, match=r"two tensors of the state would both be called 'a.b'"):
        un.checkpoint.convert(tmp_path / "x.pt", tmp_path / "y.safetensors")
