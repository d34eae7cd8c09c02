"""error_feedback: adds a codec's compression error to the next contribution, so that it is sent later, not lost.

Sources: Seide et al., "1-bit stochastic gradient descent", Interspeech 2014; Karimireddy, Rebjock, Stich and Jaggi,
"Error feedback fixes SignSGD and other gradient compression schemes", ICML 2019.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unisono.communicator import Communicator
from unisono.compression.codec import Codec, Spec, accumulation_dtype, check_bucket, resolve

__all__ = ["CODEC", "ErrorFeedback"]


class ErrorFeedback(Codec):
    """Wrapper that adds a codec's earlier compression errors to each contribution.

    With error feedback, the sum of all averages stays close to the sum of all true means, however lossy the codec is.
    Each rank needs memory for one more bucket, its residual, in float32 (float64 for float64 buckets). Residuals that
    are not finite are reset to zero, so that one bad training step does not affect all later ones. `kept` may include
    earlier compression errors.

    Args:
        codec: A codec, a class or function that returns a codec, or a name.

    Raises:
        ValueError: There is no codec of that name, or the codec is itself an `error_feedback`.
        TypeError: `codec` is of another type.

    Example:
        >>> def program(comm):
        ...     codec, total = un.compression.error_feedback(un.compression.onebit()), torch.zeros(3)
        ...     for step in range(100):
        ...         flat = torch.tensor([1.0, 2.0, 6.0])
        ...         codec.average(flat, comm, [flat.shape])
        ...         total += flat
        ...     return bool((total / 100 - flat.new_tensor([1.0, 2.0, 6.0])).abs().max() < 0.2)
        >>> un.launch(program, 2, "thread")
        [True, True]
    """

    name = "error_feedback"

    def __init__(self, codec: Spec = "onebit") -> None:
        self.codec: Codec = resolve(codec)
        if isinstance(self.codec, ErrorFeedback):
            raise ValueError(f"{self.codec!r} already feeds errors back; a second error feedback would add them twice")
        self._residual: torch.Tensor | None = None

    def __repr__(self) -> str:
        return f"error_feedback({self.codec!r})"

    def average(
        self,
        flat: torch.Tensor,
        comm: Communicator,
        shapes: Sequence[torch.Size],
        kept: torch.Tensor | None = None,
    ) -> None:
        check_bucket(flat, shapes, kept)
        residual = self._residual
        if residual is None:
            given = flat.clone().to(accumulation_dtype(flat.dtype))
        elif residual.numel() == flat.numel():
            given = flat + residual
            flat.copy_(given)
        else:
            raise ValueError(
                f"this codec holds a residual of {residual.numel()} elements, but flat has {flat.numel()}; use one "
                "codec per bucket, created by clone()"
            )
        kept = torch.empty_like(flat) if kept is None else kept
        self.codec.average(flat, comm, shapes, kept)
        self._residual = given.sub_(kept).nan_to_num_(0.0, 0.0, 0.0)

    def average_masked(
        self, flat: torch.Tensor, comm: Communicator, shapes: Sequence[torch.Size], used: Sequence[bool]
    ) -> None:
        if all(used):
            self.average(flat, comm, shapes)
            return
        # Keep an unused parameter's residual until the parameter is used again: the caller ignores the mean of an
        # unused parameter, so a residual sent now would be lost.
        sizes = torch.tensor([math.prod(shape) for shape in shapes])
        idle = torch.tensor(used).logical_not_().repeat_interleave(sizes).to(flat.device)
        owed = (
            flat.new_zeros(flat.shape, dtype=accumulation_dtype(flat.dtype))
            if self._residual is None
            else self._residual
        )
        self._residual = owed.masked_fill(idle, 0.0)
        try:
            self.average(flat, comm, shapes)
        finally:
            self._residual = torch.where(idle, owed, self._residual)

    def error_bound(self, flat: torch.Tensor, others: Sequence[torch.Tensor], shapes: Sequence[torch.Size]) -> float:
        return self.codec.error_bound(flat, others, shapes)

    def wire_bytes(self, numel: int, shapes: Sequence[torch.Size], size: int, itemsize: int) -> float:
        return self.codec.wire_bytes(numel, shapes, size, itemsize)

    def reset(self) -> None:
        super().reset()
        self.codec.reset()
        self._residual = None

    def state_dict(self) -> dict[str, Any]:
        residual = None if self._residual is None else self._residual.clone()
        return {"residual": residual, "codec": self.codec.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.codec.load_state_dict(state["codec"])
        self._residual = None if state["residual"] is None else state["residual"].clone()


CODEC = ErrorFeedback
