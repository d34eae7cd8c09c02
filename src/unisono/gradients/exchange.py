"""An exchange of one fragment of a model's parameters, and the phases that it goes through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch

from unisono.compression.codec import Codec
from unisono.core.staging import wait_for
from unisono.core.work import Completion

__all__ = ["TRANSITIONS", "Ahead", "Exchange", "Fragment", "Phase", "Share"]


class Phase(Enum):
    """State of an exchange and its result."""

    UNDER_WAY = "ranks reduce it, or it is queued behind earlier exchanges"
    OUTDATED = "ranks reduce it, but this rank's model was loaded meanwhile"
    ARRIVED = "the result is here, and its step is not"
    APPLIED = "the result is in the anchor or in the parameters"
    DROPPED = "the result has no effect, because the model was loaded before it was applied"
    FAILED = "it raised an error, which every later step raises again"


TRANSITIONS: dict[str, dict[Phase, Phase]] = {
    "arrive": {Phase.UNDER_WAY: Phase.ARRIVED, Phase.OUTDATED: Phase.DROPPED},
    "load": {Phase.UNDER_WAY: Phase.OUTDATED, Phase.ARRIVED: Phase.DROPPED},
    "apply": {Phase.ARRIVED: Phase.APPLIED},
    "fail": {Phase.UNDER_WAY: Phase.FAILED, Phase.OUTDATED: Phase.FAILED},
}
"""For each event, the next phase by current phase; see `Exchange`."""


@dataclass(eq=False)
class Share:
    """One rank's data in a timed exchange (a turn): the values it reports, and the values that all ranks agree on.

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
    """Predicted result from which training continues; changes made since then are added to the true result.

    Attributes:
        expected: The predicted parameters.
        own: With an outer optimizer: copies of this rank's contributions, in case the exchange must be repeated.
    """

    expected: list[torch.Tensor]
    own: list[torch.Tensor] = field(default_factory=list)


@dataclass(eq=False)
class Exchange:
    """An exchange of one fragment: its tensors are this rank's contributions, and later the result.

    Phases, and the events that lead from one to the next:

    =========  =======  ========  =======  ======
    phase      arrive   load      apply    fail
    =========  =======  ========  =======  ======
    UNDER_WAY  ARRIVED  OUTDATED           FAILED
    OUTDATED   DROPPED                     FAILED
    ARRIVED             DROPPED   APPLIED
    APPLIED
    DROPPED
    FAILED
    =========  =======  ========  =======  ======

    arrive: The thread that owns the fragments finds that the exchange has finished. load: The model has loaded new
    values for a parameter of the fragment. This event does not affect a finished exchange. apply: The result is about
    to step the anchor or to be copied to the parameters. fail: The thread that owns the fragments finds that the
    exchange has raised an error.

    Only the thread that owns the fragments (see `Turns`) changes the phase. The thread that reduces writes `tensors`
    and `share`, and then completes `done`.

    Attributes:
        due: The step in which the result is applied.
        tensors: The contributions and later the results, one tensor for each parameter of the fragment.
        done: Completed by the thread that reduces.
        alpha: Weight of this rank's own parameters when they are mixed with the result; None for no mixing.
        in_place: Whether the contributions are the parameters themselves, so that the result need not be copied.
        is_last: Whether this exchange is the final one, which moves the anchor by the mean change without the outer
            optimizer.
        ahead: The predicted result, if training continues from a prediction.
        share: This rank's data in a timed exchange; None if exchanges are scheduled by steps.
        streams: Streams of accelerators on which the result is computed.
        phase: The current phase.
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
    phase: Phase = Phase.UNDER_WAY

    def change(self, event: str) -> None:
        """Move to the phase that an event leads to; only this method changes the phase."""
        # An event without an entry for this phase is a fault of the caller, and raises `KeyError`.
        self.phase = TRANSITIONS[event][self.phase]

    def wait(self) -> None:
        """Wait for the result; if the exchange has failed, raise its error."""
        try:
            self.done.wait()
        except BaseException:
            # Check for completion: if only the wait was interrupted or timed out, the exchange may still finish.
            if self.done.is_completed() and self.phase is not Phase.FAILED:
                self.change("fail")
            raise
        # On an accelerator, `done` may be completed before the result has been computed on these streams.
        wait_for(self.streams)
        # `state_dict` may have waited for this exchange before `apply` does.
        if self.phase in TRANSITIONS["arrive"]:
            self.change("arrive")

    def load(self) -> None:
        """Drop the result, because the model has loaded new values."""
        if self.phase in TRANSITIONS["load"]:
            self.change("load")


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
