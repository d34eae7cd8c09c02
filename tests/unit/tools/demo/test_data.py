"""The demonstration takes pictures of one's own, and says in one sentence what is wrong with them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from unisono.host.distribution import install_command
from unisono.tools.cli import main
from unisono.tools.demo.data import load, split


def demo(*options: object) -> int:
    return main(["demo", *map(str, options)])


def arrays(count: int = 60) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    return np.random.default_rng(0).integers(0, 255, (count, 6, 5), dtype=np.uint8), np.arange(count) % 2


def image(folder: Path, name: str, mode: str = "L", size: tuple[int, int] = (9, 7)) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, color=len(name)).save(folder / name)


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3), ("P", 3), ("1", 1)])
def test_image_folder(mode: str, channels: int, tmp_path: Path) -> None:
    for index in range(6):
        image(tmp_path / "cat", f"{index}.png", mode)
        image(tmp_path / "dog", f"{index}0.png", mode, size=(80, 90))
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / ".hidden").mkdir()
    pictures = load(tmp_path)
    assert pictures.x.shape == (12, channels, 7, 9)
    assert pictures.y.tolist() == [0] * 6 + [1] * 6
    assert pictures.classes == 2


def test_large_images_are_resized(tmp_path: Path) -> None:
    for index in range(10):
        image(tmp_path / str(index % 2), f"{index}.png", size=(100, 20))
    assert load(tmp_path).x.shape == (10, 1, 20, 32)


def test_arrays_with_either_name(tmp_path: Path) -> None:
    x, y = arrays()
    np.savez_compressed(tmp_path / "a.npz", images=x, labels=y.astype(str))
    np.savez(tmp_path / "b.npz", x=x.astype(">f8")[..., None].repeat(3, axis=3), y=y + 7)
    gray, coloured = load(tmp_path / "a.npz"), load(tmp_path / "b.npz")
    assert gray.x.shape == (60, 1, 6, 5)
    assert coloured.x.shape == (60, 3, 6, 5)
    assert torch.equal(gray.y, coloured.y)
    torch.testing.assert_close(gray.x, coloured.x[:, :1], rtol=1e-3, atol=1e-3)


def test_held_out_images_are_not_used_for_training(tmp_path: Path) -> None:
    x, y = arrays()
    np.savez(tmp_path / "data.npz", x=x, y=y)
    pictures = load(tmp_path / "data.npz")
    training, held_out = split(pictures, seed=0)
    assert len(held_out) == 12
    both = torch.cat([training.x, held_out.x]).flatten(1)
    assert sorted(both.tolist()) == sorted(pictures.x.flatten(1).tolist())


def no_class(path: Path) -> None:
    image(path, "stray.png")


def empty_class(path: Path) -> None:
    image(path / "full", "one.png")
    (path / "empty").mkdir()


def broken_image(path: Path) -> None:
    image(path / "a", "fine.png")
    (path / "a" / "torn.png").write_bytes((path / "a" / "fine.png").read_bytes()[:40])


def one_class(path: Path) -> None:
    image(path / "only", "one.png")


def too_few(path: Path) -> None:
    image(path / "a", "one.png")
    image(path / "b", "two.png")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (Path.mkdir, "has no sub-folders"),
        (no_class, "has no sub-folders"),
        (empty_class, "empty holds no image files"),
        (broken_image, "torn.png cannot be read as an image"),
        (one_class, "all of one class"),
        (too_few, "training needs at least 10"),
    ],
)
def test_rejected_folder(
    make: Callable[[Path], None], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "data")
    assert demo("--data", tmp_path / "data") == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"z": np.zeros(3)}, "needs arrays named x and y, or images and labels, and has z"),
        ({}, "and has none"),
        ({"x": np.zeros((20, 8)), "y": np.arange(20)}, "must be numbers of shape (n, height, width)"),
        ({"x": np.zeros((20, 8, 8)), "y": np.arange(19)}, "the 20 pictures need as many labels"),
        ({"x": np.zeros((20, 8, 8)), "y": np.linspace(0, 1, 20)}, "whole numbers or names, but have float64"),
        ({"x": np.full((20, 8, 8), np.nan), "y": np.arange(20) % 2}, "not finite numbers"),
        ({"x": np.array([[[object()]]] * 20), "y": np.arange(20)}, "allow_pickle=False"),
        ({"x": np.zeros((0, 8, 8)), "y": np.zeros(0, int)}, "(0, 8, 8)"),
    ],
)
def test_rejected_arrays(
    given: dict[str, Any], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "data.npz", **given)
    assert demo("--data", tmp_path / "data.npz") == 2
    assert sentence in capsys.readouterr().err


def test_rejected_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = arrays()
    np.savez(tmp_path / "damaged.npz", x=x, y=y)
    whole = bytearray((tmp_path / "damaged.npz").read_bytes())
    whole[200:300] = bytes(100)
    (tmp_path / "damaged.npz").write_bytes(whole)
    (tmp_path / "text.npz").write_text("no archive")
    for name, sentence in (("text.npz", "neither a folder nor an .npz"), ("damaged.npz", "cannot be trained on")):
        assert demo("--data", tmp_path / name) == 2
        assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "options", "sentence"),
    [
        ("sklearn.datasets", [], install_command("demo")),
        ("numpy", ["--data", "pictures.npz"], install_command("demo")),
        ("PIL", ["--data", "."], "pip install pillow"),
    ],
)
def test_missing_packages(
    missing: str,
    options: list[str],
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    np.savez(tmp_path / "pictures.npz", x=[1], y=[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, missing, None)
    assert demo(*options) == 2
    assert sentence in capsys.readouterr().err
