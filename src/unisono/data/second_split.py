"""Refusal of a second division of samples among ranks, by a framework that does not see the first."""

from __future__ import annotations

import sys

__all__ = ["refuse_second_split"]

_DIVIDING = "BatchSamplerShard.", "DataLoaderDispatcher.", "IterableDatasetShard."


def refuse_second_split(ranks: int) -> None:
    """Raise `ValueError` if Accelerate's `prepare` divides what a caller, one of several ranks, iterates over.

    Accelerate looks for no distributed sampler, and has no hook: its classes are found among the callers.

    Args:
        ranks: The number of ranks that the caller divides the samples among.
    """
    frame = sys._getframe(1) if ranks > 1 and "accelerate.data_loader" in sys.modules else None
    while frame is not None:
        named = frame.f_globals.get("__name__") == "accelerate.data_loader"
        if named and frame.f_code.co_qualname.startswith(_DIVIDING):
            raise ValueError(
                f"Accelerate divides this rank's part of the samples among the {ranks} ranks again, so that most are "
                "left out. Leave the loader out of accelerator.prepare(), or divide the samples by prepare() alone"
            )
        frame = frame.f_back
