"""One collective as the engine carries it out: its plan, where it goes, by which algorithm, and what to compare."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unisono.activity import Noted
from unisono.fingerprint import Fingerprint
from unisono.plan import Plan
from unisono.select import choose
from unisono.site import call_site
from unisono.transport import Transport
from unisono.wrappers.trace import traced

__all__ = ["Calling", "called"]


@dataclass(frozen=True, slots=True)
class Calling:
    """A call, put down when it is made.

    Attributes:
        noted: For whoever asks what this rank is doing.
        timeout: Seconds.
        inference: Whether it was made in inference mode.
    """

    plan: Plan
    transport: Transport
    algorithm: str
    fingerprint: Fingerprint
    noted: Noted
    timeout: float
    inference: bool


def called(plan: Plan, transport: Transport, name: str, number: int, algorithm: str | None, timeout: float) -> Calling:
    """The call of this number among a group's collectives."""
    call, example = plan.call, plan.example
    chosen = choose(transport, call, plan.nbytes, algorithm)
    fingerprint = Fingerprint(
        call=number,
        operation=name,
        op=None if call.asked is None else call.asked.value,
        root=call.root,
        dtype=None if example is None else str(example.dtype).removeprefix("torch."),
        counts=plan.counts,
        device=None if example is None else example.device.type,
        algorithm=chosen,
        sends=plan.sends,
        receives=plan.receives,
        shape=None if example is None else tuple(example.shape),
        site=call_site(),
    )
    noted = name, number, _detail(fingerprint), fingerprint.site
    return Calling(plan, traced(transport), chosen, fingerprint, noted, timeout, torch.is_inference_mode_enabled())


def _detail(fingerprint: Fingerprint) -> str:
    """What is said of a call beside its name."""
    root = None if fingerprint.root is None else f"root {fingerprint.root}"
    words = fingerprint.op, fingerprint.dtype, fingerprint.shape, root
    return ", ".join(str(word) for word in words if word is not None)
