"""Progress of training: a bar on a terminal, else a line per epoch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from unisono.host.distribution import install_command

__all__ = ["Tell", "progress"]

Tell = Callable[[torch.Tensor], None]


@contextmanager
def progress(epochs: int, steps: int, *, shown: bool) -> Iterator[Tell]:
    """Yield a callback for the loss of each step; it prints nothing unless `shown`."""
    if not shown:
        yield lambda loss: None
    elif not sys.stdout.isatty():
        yield _lines(epochs, steps)
    else:
        try:
            from rich.progress import Progress
        except ImportError:
            print(f"(for a progress bar: {install_command('cli')})", flush=True)
            yield _lines(epochs, steps)
        else:
            with Progress() as bar:
                task = bar.add_task("training", total=epochs * steps)

                def advance(loss: torch.Tensor) -> None:
                    bar.update(task, advance=1, description=f"training, loss {float(loss):.3f}")

                yield advance


def _lines(epochs: int, steps: int) -> Tell:
    """A line after each epoch: its mean loss on this rank."""
    losses: list[torch.Tensor] = []

    def tell(loss: torch.Tensor) -> None:
        losses.append(loss)
        if len(losses) % steps == 0:
            mean = float(torch.stack(losses[-steps:]).mean())
            print(f"epoch {len(losses) // steps:2} of {epochs}: loss {mean:.4f}", flush=True)

    return tell
