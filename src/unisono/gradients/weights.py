"""Weights of the ranks' gradients in one step."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from unisono.comm.engine import Engine
from unisono.communicator import Communicator
from unisono.errors import CommError, MismatchError

__all__ = [
    "AllRanksDone",
    "ErrorContext",
    "Weights",
    "check_average",
    "check_skipped",
    "used_gradients",
    "warn_of_uneven_batches",
]


class AllRanksDone(Exception):
    """No rank has any data left."""


class Weights:
    """Conversion of the ranks' weights in a step into factors by which their gradients are multiplied.

    Attributes:
        comm: Communicator for exchanging the weights.
        joining: Whether some ranks may have run out of data, so that each rank must report whether it still has data.
        uneven: Whether ranks must exchange weights in this step; if not, `factor` is already valid.
        here: Whether this rank still has data.
        active: Number of ranks that take part in this step.
        source: The lowest rank that takes part in this step.
        in_use: Whether a pass in `no_sync` has run since this rank's weight was set.
        factor: Factor for this rank's gradient, applied before the ranks' gradients are averaged.
    """

    def __init__(self, comm: Communicator, total: bool = False) -> None:
        self._total = total
        self.joining = False
        self.here = True
        self.attach(comm)
        self.forget()

    def attach(self, comm: Communicator) -> None:
        """Exchange weights over `comm` from now on."""
        self.comm = comm
        self._size = comm.size

    def set(self, n_samples: float) -> None:
        """Set this rank's weight in the next step."""
        if self._total:
            raise ValueError("gradients are summed, and a sum has no weights; use average='mean'")
        if not 0 <= n_samples < float("inf"):
            raise ValueError(f"a weight must be a number of at least 0, not {n_samples}")
        self._mine: float | None = float(n_samples)
        self.uneven: bool = True
        self.in_use: bool = False

    def keep(self) -> None:
        """Record that a pass ran in `no_sync`: this step's weight, if set, also applies to that pass's gradient."""
        self.in_use = self._mine is not None

    def shared_factor(self) -> float:
        """Return this step's factor. Collective if weights may differ; raises `AllRanksDone` if no rank has data."""
        size = self._size
        mine = self._mine
        if not self.uneven:
            return self.factor
        weight = float(self.here) if mine is None or not self.here else mine
        figures = torch.tensor([float(self.here), weight], dtype=torch.float64, device=self.comm.device)
        by_rank = figures.new_empty(2 * size)
        with ErrorContext(
            "exchanging weights (all ranks or none must call weight()), and which ranks have data left in join()"
        ):
            self.comm.all_gather_single(by_rank, figures)
        here, weights = by_rank.view(size, 2).t().tolist()
        self.active: int = here.count(1.0)
        if not self.active:
            raise AllRanksDone
        self.source: int = here.index(1.0)
        total = sum(weights)
        if not total:
            raise ValueError("the weights of all ranks are 0, so there is no mean")
        self.factor: float = weight * size if self._total else weight * size / total
        return self.factor

    def forget(self) -> None:
        """Reset all weights for the next step."""
        self._mine = None
        self.in_use = False
        self.uneven = self.joining
        self.active = self._size
        self.source = 0
        self.factor = float(self._size) if self._total else 1.0


def warn_of_uneven_batches(engine: Engine) -> None:
    """Warn once that gradients are averaged without weights over batches whose sizes differ between ranks."""
    if engine.uneven_batches:
        engine.uneven_batches = False
        warnings.warn(
            "GlobalBatchSampler gives ranks batches of unequal sizes, and the mean of the ranks' gradients is not that "
            "over their samples then. Call averager.weight(len(batch)) before each backward(), or pass average='sum' "
            "and divide each loss by the size of the whole batch",
            stacklevel=2,
        )


class ErrorContext:
    """Context manager that adds the current operation as a note to a `CommError` raised in its block."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, CommError):
            error.add_note(f"while {self._what}")


def check_average(average: str) -> bool:
    """Return whether gradients are summed; raise `ValueError` for anything but "mean" and "sum"."""
    if average not in ("mean", "sum"):
        raise ValueError(f"average must be 'mean' or 'sum', not {average!r}")
    return average == "sum"


def used_gradients(names: Sequence[str]) -> str:
    """Return the error text for hooks that used the gradients of the parameters `names` before averaging."""
    more = f" (and of {len(names) - 1} more)" if len(names) > 1 else ""
    return (
        f"the gradient of {names[0]!r}{more} was used in this backward pass before it was averaged: a hook has removed "
        "it, or has made an optimizer's step with this rank's gradient alone, after which the parameters of ranks "
        "differ. Make the step after backward() has returned"
    )


def check_skipped(names: Sequence[str], lacking: Sequence[Sequence[str]], active: int, comm: Communicator) -> None:
    """Raise `MismatchError` if a gradient is missing on some, but not all, of the ranks that take part.

    Args:
        names: Names of the parameters, in order.
        lacking: For each rank, the names of the parameters without a gradient on that rank.
        active: Number of ranks that take part.
        comm: Communicator of all ranks in `lacking`.
    """
    partly = [name for name in names if 0 < sum(name in lacks for lacks in lacking) < active]
    if not partly:
        return
    ranks = [rank for rank, lacks in enumerate(lacking) if partly[0] in lacks]
    more = f" (and {len(partly) - 1} more)" if len(partly) > 1 else ""
    raise MismatchError(
        f"rank {', '.join(map(str, ranks))} has no gradient for {partly[0]!r}{more}, which other ranks have: it "
        "skipped a part of the model. Pass find_unused_parameters=True if that is intended",
        rank=comm.rank,
        size=comm.size,
        peer=ranks[0],
    )
