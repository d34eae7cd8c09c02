"""Request of one collective to the engine: its plan, transport, algorithm, and fingerprint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from unisono.collectives.plan import Plan, message_bytes
from unisono.collectives.selection import choose
from unisono.collectives.tuning.prediction import Machine
from unisono.core.call_site import call_site
from unisono.core.fingerprint import Fingerprint
from unisono.core.flight_recorder import CallRecord
from unisono.core.tensors import numels
from unisono.core.transport import Transport
from unisono.wrappers.trace import traced

__all__ = ["CollectiveRequest", "fingerprint_of", "make_request"]


@dataclass(frozen=True, slots=True)
class CollectiveRequest:
    """Description of a collective call, created when it is made.

    Attributes:
        plan: Plan of the call's tensors.
        transport: Transport that runs it.
        algorithm: Name of an algorithm, or "native".
        fingerprint: Values that ranks compare.
        noted: Record of the call for hang reports.
        timeout: Seconds.
        inference: Whether the call was made in inference mode.
        follow: Makes the request that follows this one with no other between, from what this one has received.
    """

    plan: Plan
    transport: Transport
    algorithm: str
    fingerprint: Fingerprint
    noted: CallRecord
    timeout: float
    inference: bool
    follow: Callable[[], CollectiveRequest] | None = None


def make_request(
    plan: Plan,
    transport: Transport,
    number: int,
    algorithm: str | None,
    timeout: float,
    deterministic: bool,
    machine: Callable[[], Machine],
    *,
    site: str | None = None,
) -> CollectiveRequest:
    """Return the request of this number among a group's collectives.

    `site` is the line of the call, if it is known; `machine` is what "auto" depends on.
    """
    nbytes = message_bytes(plan.call, transport.size)
    chosen = choose(transport, plan.call, nbytes, algorithm, deterministic=deterministic, machine=machine)
    fingerprint = fingerprint_of(plan, number, chosen, site)
    noted = fingerprint.operation, number, _detail(fingerprint), fingerprint.site
    return CollectiveRequest(
        plan, traced(transport), chosen, fingerprint, noted, timeout, torch.is_inference_mode_enabled()
    )


def fingerprint_of(plan: Plan, number: int, algorithm: str, site: str | None = None) -> Fingerprint:
    """Return the fingerprint of a call."""
    what, call, like = plan.collective, plan.call, plan.like
    read, written = numels(call.inputs), numels(call.outputs)
    site = site or call_site()
    if plan.origin is not None:
        site = f"{site}, backward of {plan.origin[1]}"
    return Fingerprint(
        call=number,
        operation=what.name,
        op=None if call.requested_op is None else call.requested_op.value,
        root=call.root,
        dtype=None if like is None else str(like.dtype).removeprefix("torch."),
        counts=call.lengths or what.compared_counts(read, written),
        device=None if like is None else like.device.type,
        algorithm=algorithm,
        adjoint_of=None if plan.origin is None else plan.origin[0],
        sends=read if what.pairwise else (),
        receives=written if what.pairwise else (),
        shape=None if like is None else tuple(like.shape),
        site=site,
    )


def _detail(fingerprint: Fingerprint) -> str:
    """Return the description of a call without its name."""
    root = None if fingerprint.root is None else f"root {fingerprint.root}"
    shape = None if fingerprint.shape is None else str(fingerprint.shape)
    words = fingerprint.op, fingerprint.dtype, shape, root
    return ", ".join(filter(None, words))
