"""Plans of a communicator's calls, made of the caller's arguments."""

from __future__ import annotations

from typing import Any

import torch

from unisono.collectives.arguments import Splits, check_arguments
from unisono.collectives.plan import Plan, make_plan
from unisono.collectives.selection import NATIVE
from unisono.comm.request import fingerprint_of
from unisono.comm.state import CommunicatorState
from unisono.core.buffer_guard import BufferGuard
from unisono.core.call_site import call_site
from unisono.core.collective import Collective
from unisono.core.control import ControlPlane
from unisono.core.fast_path import Tensors
from unisono.core.fingerprint import Fingerprint
from unisono.core.reduce_op import parse_op
from unisono.core.staging import Staging
from unisono.core.transport import Options, Transport

__all__ = ["CallPlans"]


class CallPlans(CommunicatorState):
    """State of a communicator, and what its calls are checked and planned by.

    Args:
        transport, control, options: As for `CommunicatorState`.
        full_check: Whether calls detect a tensor that was changed before they ended.
    """

    def __init__(
        self, transport: Transport, control: ControlPlane, options: Options, *, full_check: bool = False
    ) -> None:
        super().__init__(transport, control, options)
        self._full_check = full_check
        self._streams: dict[torch.device, torch.Stream] = {}

    def staging(self) -> Staging:
        """Return the staging that makes a call's tensors one-dimensional and contiguous."""
        away, streams = self.transport.host_staged, self._streams
        if self._full_check:
            return BufferGuard(away, streams, f"the call at {call_site()}")
        return Staging(away, streams)

    def plan(
        self,
        what: Collective,
        output: Tensors,
        input: Tensors,
        op: object,
        root: int | None,
        splits: Splits = (None, None),
        lengths: tuple[int, ...] = (),
        staging: Staging | None = None,
        origin: tuple[int, str] | None = None,
    ) -> Plan:
        """Return the plan of a call with these arguments; raise for those that this rank alone can find wrong."""
        group, devices = self.group, self.transport.devices
        read, written = check_arguments(what, output, input, root, splits, group.rank, group.size, devices)
        reduces = parse_op(op) if what.reduces else None
        plan = make_plan(what, read, written, reduces, root, group.size, staging or self.staging(), lengths)
        if written.tensors and what.writes(group.rank, root or 0):
            results: Any = output if what.gathers and not what.packed else (output,)
            lists = [id(buffer) for buffer in results if isinstance(buffer, list)]
            if len(set(lists)) < len(lists):
                raise ValueError(f"{what.output} has one list several times; pass separate lists")
            for buffer, tensor in zip(results, written.tensors, strict=True):
                plan.staging.write_back(buffer, tensor)
        plan.origin = origin
        return plan

    def _fingerprint(
        self, what: Collective, output: Tensors, input: Tensors, op: object, root: int | None
    ) -> Fingerprint:
        return fingerprint_of(self.plan(what, output, input, op, root), self._calls + 1, NATIVE)
