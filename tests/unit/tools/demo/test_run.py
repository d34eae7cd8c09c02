"""The demonstration learns, proves what it says, and refuses what cannot be in one sentence."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import unisono as un
from unisono.host.distribution import install_command
from unisono.host.network import why_no_shm
from unisono.tools.cli import main
from unisono.tools.demo import run as demonstration
from unisono.tools.demo.data import Pictures, load, split
from unisono.tools.demo.train import Batches, progress, train

ACCURACY = re.compile(r"^test accuracy: (\d+\.\d) %$", re.MULTILINE)
NEXT = re.compile(r"^next: (.+)$", re.MULTILINE)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Bright pictures and dark ones."""
    classes = np.arange(60) % 2
    noise = np.random.default_rng(0).integers(0, 100, (60, 6, 5))
    np.savez(tmp_path / "pictures.npz", x=noise + 100 * classes[:, None, None], y=classes)
    return tmp_path / "pictures.npz"


def demo(*options: object) -> int:
    return main(["demo", *map(str, options)])


# -- the whole of it -------------------------------------------------------------------------------
@pytest.mark.soak
def test_command_line() -> None:
    command = [sys.executable, "-W", "error", "-m", "unisono", "demo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert f"2 ranks, backend {'gloo' if why_no_shm() else 'shm'}" in done.stdout
    assert "in communication" in done.stdout
    assert "FAILED" not in done.stdout
    (percent,) = ACCURACY.findall(done.stdout)
    assert float(percent) >= 95
    apart, ring = map(float, re.findall(r"(\d\.\de[-+]\d+)", done.stdout))
    assert 0 < apart <= 1e-10
    assert ring <= 1e-10
    assert done.stdout.splitlines()[-1].endswith("-m unisono demo --ranks 4")


@pytest.mark.parametrize("ranks", [1, 3])
def test_user_images_with_threads(ranks: int, archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo("--backend", "thread", "--ranks", ranks, "--epochs", 10, "--data", archive) == 0
    said = capsys.readouterr().out
    assert ACCURACY.findall(said) == ["100.0"]
    assert "epoch 10 of 10: loss" in said
    assert NEXT.search(said)


def test_equivalence_fails_without_averaging(
    archive: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(un, "average_gradients", lambda model, comm: None)
    assert demo("--backend", "thread", "--epochs", 1, "--data", archive) == 1
    assert re.search(r"no weight differs .* FAILED", capsys.readouterr().out)


def test_equivalence_fails_with_a_wrong_ring(
    archive: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demonstration, "ring_error", lambda comm, seed: float("nan"))
    assert demo("--backend", "thread", "--epochs", 1, "--data", archive) == 1
    assert re.search(r"plain sum .* FAILED", capsys.readouterr().out)


def test_same_seed_same_weights(archive: Path) -> None:
    few, _ = split(load(archive), seed=3)

    def run(seed: int) -> dict[str, torch.Tensor]:
        results = un.launch(train, 2, "thread", args=(few, 1, seed))
        assert all(torch.equal(results[0].weights[name], results[1].weights[name]) for name in results[0].weights)
        assert 0 < results[0].communication_s < results[0].seconds
        weights: dict[str, torch.Tensor] = results[0].weights
        return weights

    before = torch.random.get_rng_state()
    first, again, other = run(5), run(5), run(6)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


# -- batches ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 131])
def test_ranks_share_each_batch(ranks: int) -> None:
    pictures = Pictures(torch.zeros(131, 1, 1, 1), torch.zeros(131, dtype=torch.int64), 2, "blanks")
    batches = Batches(pictures, ranks, seed=1)
    for epoch in (0, 1):
        whole = batches.whole(epoch)
        assert len(whole) == batches.steps == min(3, 131 // ranks)
        assert all(len(share.indices) for rank in range(ranks) for share in batches.of(rank, epoch))
        assert sorted(torch.cat([batch.indices for batch in whole]).tolist()) == list(range(131))
        for step, shares in enumerate(zip(*(batches.of(rank, epoch) for rank in range(ranks)), strict=True)):
            assert torch.equal(torch.cat([share.indices for share in shares]), whole[step].indices)
            # The mean over ranks of sums over this is the mean over the batch.
            assert all(share.divisor * ranks == pytest.approx(whole[step].divisor) for share in shares)
    if batches.steps > 1:
        assert not torch.equal(batches.whole(0)[0].indices, batches.whole(1)[0].indices)


# -- what cannot be --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--backend", "carrier-pigeon"], r"unknown transport 'carrier-pigeon'; known: .*gloo.*thread"),
        (["--backend", "nccl"], "--backend nccl supports tensors on GPUs only: add --device cuda"),
        (["--ranks", "0"], "--ranks must be at least 1, not 0"),
        (["--ranks", "1439"], "--ranks 1439 is more than the 1438 pictures to train on"),
        (["--epochs", "0"], "--epochs must be at least 1, not 0"),
        (["--seed", "-1"], "--seed must be at least 0, not -1"),
        (["--data", "/nowhere/at/all"], "/nowhere/at/all does not exist: pass a folder"),
    ],
)
def test_rejected_arguments(options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo(*options) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(rf"unisono demo: .*{sentence}.*\n", said.err)


def test_no_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert demo("--device", "cuda") == 2
    assert "torch sees no GPU here" in capsys.readouterr().err


# -- progress --------------------------------------------------------------------------------------
@pytest.mark.parametrize("rich", [True, False])
def test_progress_at_a_terminal(
    rich: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.progress", None)
    with progress(epochs=2, steps=2, shown=True) as tell:
        for _ in range(4):
            tell(torch.tensor(0.25))
    said = capsys.readouterr().out
    if rich:
        assert "100%" in said
        assert "0.250" in said
    else:
        assert install_command("cli") in said
        assert "epoch  2 of 2: loss 0.2500" in said


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(epochs=1, steps=1, shown=False) as tell:
        tell(torch.tensor(0.25))
    assert capsys.readouterr().out == ""
