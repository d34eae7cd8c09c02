"""Train a small network on real handwritten digits on several ranks, and prove that one rank gets the same result.

The digits are a data set in scikit-learn; use --data to train on your own images.

  unisono demo
  unisono demo -n 4 --backend gloo --epochs 3
  unisono demo --json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from unisono.tools.cli import refusing

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options; see `unisono.tools.demo.DemoSettings`."""
    # Repeat defaults as literals: reading them from `DemoSettings` would import torch, which would make --help slow.
    add = parser.add_argument
    add("-n", "--ranks", type=int, default=2, help="number of ranks (%(default)s)")
    add("--backend", default="auto", help="shm, gloo, thread, ...; auto chooses the best available backend")
    add("--epochs", type=int, default=12, help="passes over the pictures (%(default)s)")
    add(
        "--data",
        type=Path,
        metavar="PATH",
        help="folder with a sub-folder of images for each class, or .npz file with arrays x and y, or images and "
        "labels",
    )
    add("--device", choices=("cpu", "cuda"), default="cpu", help="device to train on (%(default)s)")
    add("--seed", type=int, default=0, help="seed of weights, partitions and order (%(default)s)")
    add("--json", action="store_true", help="print the results as JSON, and nothing else")


def run(given: argparse.Namespace) -> int:
    """Run the demonstration; return 1 if the proof fails."""
    from unisono.tools.demo import DemoSettings, prepare, show

    with refusing(ValueError, OSError):
        ready = prepare(DemoSettings(given.ranks, given.backend, given.epochs, given.data, given.device, given.seed))
    return show(ready, as_json=given.json)
