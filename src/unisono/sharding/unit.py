"""Units: modules whose parameters are gathered, reduced and freed together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from unisono.communicator import Communicator
from unisono.sharding.flat_gradient import FlatGradient
from unisono.sharding.flat_parameters import FlatParameters
from unisono.sharding.partition import UnitPlan

__all__ = ["Unit", "make_units"]


class Unit:
    """Parameters that are gathered together, and the modules that are running and need them.

    Args:
        plan: Its name, modules and parameters.
        flats: Its parameters, by dtype, device and `requires_grad`.

    Attributes:
        name, modules, flats: As passed.
        running: The modules whose forward is running, the innermost one last.
        calls: Numbers of the forward calls that the running backward pass has reached and not left.
        frees_after_gradients: Whether backward needs no parameter once all have their gradients: none is frozen.
    """

    def __init__(self, plan: UnitPlan, flats: Sequence[FlatParameters]) -> None:
        self.name, self.modules, self.flats = plan.name, plan.modules, flats
        self.running: list[nn.Module] = []
        self.calls: set[int] = set()
        self.frees_after_gradients = all(flat.gradient is not None for flat in flats)

    @property
    def gathered(self) -> bool:
        """Return whether its parameters can be used."""
        return all(flat.gathered for flat in self.flats)

    @property
    def gradients(self) -> list[FlatGradient]:
        """Return the gradients of its trained parameters."""
        return [flat.gradient for flat in self.flats if flat.gradient is not None]

    def start_gather(self, *, async_op: bool) -> None:
        """Begin to fill its parameters, unless they are filled. Collective."""
        for flat in self.flats:
            flat.start_gather(async_op=async_op)

    def finish_gather(self) -> None:
        """Wait until its parameters can be used."""
        for flat in self.flats:
            flat.finish_gather()

    def free(self) -> None:
        """Release the memory of its parameters, unless one of its modules is running."""
        self.calls.clear()
        if not self.running:
            for flat in self.flats:
                flat.free()

    def is_complete(self) -> bool:
        """Return whether each trained parameter has a gradient that is not reduced."""
        return all(
            flat.gradient is None or len(flat.gradient.taken) == sum(p.requires_grad for p in flat.parameters)
            for flat in self.flats
        )

    def reduce(self, *, async_op: bool) -> None:
        """Begin to average the gradients that were taken. Collective."""
        for gradient in self.gradients:
            if gradient.taken:
                gradient.start_reduce(async_op=async_op)


def make_units(
    plans: Sequence[UnitPlan],
    comm: Communicator,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
) -> list[Unit]:
    """Shard the parameters of each unit.

    No two messages have one length: the communicator's check then finds ranks that are at different units.
    """
    lengths: set[int] = set()
    units = []
    for plan in plans:
        kinds: dict[object, list[tuple[str, torch.Tensor]]] = {}
        for name, p in plan.parameters:
            kinds.setdefault((p.dtype, p.device, p.requires_grad), []).append((name, p))
        flats = []
        for named in kinds.values():
            used = sum(p.numel() for _, p in named)
            length = max(1, -(-used // comm.size))
            while length in lengths:
                length += 1
            lengths.add(length)
            flats.append(
                FlatParameters(
                    named, comm, length * comm.size - used, param_dtype=param_dtype, reduce_dtype=reduce_dtype
                )
            )
        units.append(Unit(plan, flats))
    return units
