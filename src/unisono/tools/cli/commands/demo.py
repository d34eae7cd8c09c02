"""Train a small network on real handwritten digits on several ranks, and prove that it equals one rank.

The digits come with scikit-learn; --data names pictures of your own.

  unisono demo
  unisono demo -n 4 --backend gloo --epochs 3
"""

from __future__ import annotations

import argparse
from pathlib import Path

from unisono.tools.cli import UsageError
from unisono.tools.demo import Settings, prepare, show

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options; see `unisono.tools.demo.Settings`."""
    normal = Settings()
    add = parser.add_argument
    add("-n", "--ranks", type=int, default=normal.ranks, help="number of ranks (%(default)s)")
    add("--backend", default=normal.backend, help="shm, gloo, thread, ...; auto chooses the best available backend")
    add("--epochs", type=int, default=normal.epochs, help="passes over the pictures (%(default)s)")
    add(
        "--data",
        type=Path,
        metavar="PATH",
        help="folder with a sub-folder of images for each class, or .npz file with arrays x and y, or images and "
        "labels",
    )
    add("--device", choices=("cpu", "cuda"), default=normal.device, help="device to train on (%(default)s)")
    add("--seed", type=int, default=normal.seed, help="seed of weights, partitions and order (%(default)s)")


def run(given: argparse.Namespace) -> int:
    """Run the demonstration; return 1 if the proof fails."""
    try:
        ready = prepare(Settings(given.ranks, given.backend, given.epochs, given.data, given.device, given.seed))
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    return show(ready)
