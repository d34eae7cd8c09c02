"""A fragment of a model's parameters, and the exchange of a fragment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from unisono.compression.codec import Codec
from unisono.core.staging import wait_for
from unisono.core.work import Completion

__all__ = ["Ahead", "Exchange", "Fragment", "Share"]


@dataclass(eq=False)
class Share:
    """One rank's data in a timed exchange (a turn): values that the rank reports, and values that all ranks agree on.

    Attributes:
        samples: Weight of this rank's contribution; 0 if the rank is late.
        leaving: Whether this rank has nothing more to contribute.
        behind_s: Seconds from the start of the turn until this rank took part.
        rates: Learning rates of the outer optimizer, one for each parameter group.
        of_all: Total weight of all ranks; if it is 0, there is no result.
    """

    samples: float
    leaving: bool
    behind_s: float
    rates: list[float]
    of_all: float = 1


@dataclass(eq=False)
class Ahead:
    """Predicted result from which training continues; changes made in the meantime are added to the true result.

    Attributes:
        expected: The predicted parameters.
        own: With an outer optimizer, copies of this rank's contributions, in case the exchange must be repeated.
    """

    expected: list[torch.Tensor]
    own: list[torch.Tensor] = field(default_factory=list)


@dataclass(eq=False)
class Exchange:
    """An exchange of one fragment: its tensors are this rank's contributions, and later the result.

    `Fragment.exchange` refers to an exchange from its start until its result is applied, and keeps referring to a
    failed exchange, because `PeriodicAverager.move_to` has to repeat that exchange.

    All attributes belong to the thread that owns the fragments (see `Turns`), except that the reducing thread writes
    `tensors` and `share` before it completes `done`.

    Attributes:
        due: The step in which the result is applied.
        tensors: The contributions and later the results, one tensor for each parameter of the fragment.
        done: Work that the reducing thread completes.
        alpha: Weight of this rank's own parameters when they are mixed with the result; None for no mixing.
        in_place: Whether the contributions are the parameters themselves, so that the result need not be copied.
        is_last: Whether this is the final exchange, whose mean change is applied to the anchor directly, without a step
            of the outer optimizer.
        ahead: The predicted result, if training continues from a prediction.
        share: This rank's data in a timed exchange; None if exchanges are scheduled by steps.
        streams: Streams of accelerators on which the result is computed.
        loaded: Positions, in `tensors`, of the parameters that were loaded with new values since the exchange began.
            The exchange has no effect on loaded parameters, and if it fails, contributions of loaded parameters are not
            repeated.
    """

    due: int
    tensors: list[torch.Tensor]
    done: Completion
    alpha: float | None
    in_place: bool = False
    is_last: bool = False
    ahead: Ahead | None = None
    share: Share | None = None
    streams: Sequence[torch.Stream] = ()
    loaded: set[int] = field(default_factory=set)

    def wait(self) -> None:
        """Wait for the result; if the exchange has failed, raise its error. If interrupted, wait again."""
        self.done.wait()
        # On accelerators, `done` may be completed before the result has been computed, so also wait for the streams
        # that compute it.
        wait_for(self.streams)


@dataclass(eq=False)
class Fragment:
    """Parameters that are exchanged together.

    Attributes:
        members: Indices of the fragment's parameters among the model's floating-point parameters.
        anchor: The anchor's tensors for these parameters; empty without an anchor.
        codecs: A codec for each message, or None for an uncompressed message. Empty without compression.
        rounds: Number of exchanges applied.
        missed: Number of exchanges that lacked this rank's contribution because it was late.
        samples: Number of samples that this rank has trained on since its last contribution.
        exchange: The exchange in flight, or None.
        is_loaded: Whether this rank has loaded the anchor since the last exchange; if so, the next exchange compares
            the anchors of all ranks.
    """

    members: list[int]
    anchor: list[torch.Tensor]
    codecs: list[Codec | None] = field(default_factory=list)
    rounds: int = 0
    missed: int = 0
    samples: float = 0
    exchange: Exchange | None = None
    is_loaded: bool = False
