"""Random optimizers: torch's with random options, and ones that are composed at random, some not elementwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["Kind", "draw_kind"]


@dataclass(frozen=True)
class Kind:
    """A class and its options."""

    cls: type[Optimizer]
    options: dict[str, Any]

    @property
    def coupled(self) -> bool:
        """True if updates of elements depend on others, or on a number that no state has: it may be refused."""
        return bool(self.options.get("couple")) or self.options.get("count") == "object"

    def make(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Return an optimizer of whole parameters."""
        return self.cls(groups, **self.options)


class Drawn(Optimizer):
    """An optimizer of optional parts.

    Args:
        params: Parameters or groups.
        lr: Factor of updates.
        decay: Factor of the parameter that is added to its gradient.
        momentum: Factor of the last update.
        second: Whether gradients are divided by the square root of a mean of squares.
        sign: Whether only signs count.
        count: Where the number of steps is, by which updates are divided: "" for nowhere, "tensor" and "number" for the
            state of each parameter, "group", or "object".
        couple: What makes elements depend on each other: "" for nothing, "norm", "all", "mean", "distance", "noise" or
            "ndim".
    """

    steps = 0

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make a step."""
        loss = None if closure is None else closure()
        if self.defaults["count"] == "object":
            self.steps += 1
        for group in self.param_groups:
            members = [p for p in group["params"] if p.grad is not None]
            group["made"] = group.get("made", 0) + 1
            if group["couple"] == "distance":
                group["d"] = max(group.get("d", 1e-3), 1e-2 * sum(float(p.grad.abs().sum()) for p in members))
            for p in members:
                p.sub_(group["lr"] * self._update(group, members, p))
        return loss

    def _update(self, group: dict[str, Any], members: Sequence[Any], p: Any) -> torch.Tensor:
        state = self.state[p]
        update = self._coupled(group, members, p) + group["decay"] * p
        if group["second"]:
            state["second"] = state.get("second", torch.zeros_like(p)) * 0.9 + update.square() * 0.1
            update = update / (state["second"].sqrt() + 1e-3)
        if group["momentum"]:
            state["momentum"] = state.get("momentum", torch.zeros_like(p)) * group["momentum"] + update
            update = state["momentum"]
        if group["count"] in ("tensor", "number"):
            start = torch.zeros((), dtype=torch.float64) if group["count"] == "tensor" else 0
            state["count"] = state.get("count", start) + 1
            update = update / state["count"]
        if group["count"] in ("group", "object"):
            update = update / (group["made"] if group["count"] == "group" else self.steps)
        return update.sign() if group["sign"] else update

    @staticmethod
    def _coupled(group: dict[str, Any], members: Sequence[Any], p: Any) -> torch.Tensor:
        how, grad = group["couple"], p.grad
        if how == "norm":
            return grad / (grad.norm() + 1e-3)
        if how == "all":
            return grad / (sum(q.grad.square().sum() for q in members) + 1e-3)
        if how == "mean":
            return grad - grad.mean() if grad.numel() > 1 else grad
        if how == "distance":
            return grad * group["d"]
        if how == "noise":
            return grad + torch.randn_like(grad)
        if how == "ndim":
            return grad + 0.1 * p if p.ndim > 1 else grad
        return grad.clone()


def draw_kind(draw: Random) -> Kind:
    """Return a random optimizer."""
    if draw.random() < 0.5:
        return Kind(Drawn, _parts(draw))
    optim = torch.optim
    decay = {"weight_decay": draw.choice([0.0, 0.1])}
    lists = {"foreach": draw.choice([None, True, False])}
    both = {**decay, **lists, "lr": draw.choice([0.01, 0.1])}
    # Far from zero, where updates by signs magnify what rounding leaves.
    far = {"eps": 1e-3}
    kinds: list[tuple[type[Optimizer], dict[str, Any]]] = [
        (optim.SGD, both),
        (optim.SGD, {**both, "momentum": 0.9, "nesterov": draw.random() < 0.5, "maximize": draw.random() < 0.2}),
        (optim.SGD, {**both, "momentum": 0.5, "dampening": 0.3}),
        (optim.Adam, {**both, **far, "amsgrad": draw.random() < 0.5, "betas": (0.8, 0.9)}),
        (optim.Adam, {"lr": 0.01, **far, "fused": True}),
        (optim.AdamW, {**both, **far}),
        (optim.NAdam, {**both, **far, "decoupled_weight_decay": draw.random() < 0.5}),
        (optim.RAdam, {**both, **far}),
        (optim.Adamax, {**both, **far}),
        (optim.Adagrad, {**both, **far, "lr_decay": draw.choice([0.0, 0.1]), "initial_accumulator_value": 0.1}),
        (optim.Adadelta, {**both, **far}),
        (optim.RMSprop, {**both, **far, "centered": draw.random() < 0.5, "momentum": draw.choice([0.0, 0.9])}),
        (optim.Rprop, {**lists, "lr": 0.01}),
        (optim.ASGD, {**both, "t0": draw.choice([1.0, 1e6])}),
    ]
    return Kind(*draw.choice(kinds))


def _parts(draw: Random) -> dict[str, Any]:
    couple = draw.choice(["norm", "all", "mean", "distance", "noise", "ndim"]) if draw.random() < 0.2 else ""
    return {
        "lr": draw.choice([0.01, 0.1]),
        "decay": draw.choice([0.0, 0.1]),
        "momentum": draw.choice([0.0, 0.5, 0.9]),
        "second": draw.random() < 0.4,
        "sign": draw.random() < 0.1,
        "count": draw.choices(["", "tensor", "number", "group", "object"], [8, 4, 4, 4, 1])[0],
        "couple": couple,
    }
