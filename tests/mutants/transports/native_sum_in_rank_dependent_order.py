"""Native all_reduce that adds contributions in another order on every rank, so that bits differ."""

from __future__ import annotations

import torch

from unisono.core.call import Call
from unisono.core.transport import Transport
from unisono.core.types import COLLECTIVE_TAG, PointToPoint, Recv, ReduceOp, Send, Work
from unisono.core.work import Completion
from unisono.wrappers.base import Wrapper

CHECK = "results_are_bitwise_reproducible"
ERROR = "ranks hold . different results"


class Mutant(Wrapper):
    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.native = frozenset({"all_reduce"})

    def wrap_child(self, inner: Transport) -> Mutant:
        return Mutant(inner)

    def supports(self, call: Call) -> bool:
        return call.name == "all_reduce" and call.op is ReduceOp.SUM and call.inputs[0].is_floating_point()

    def run(self, call: Call, over: PointToPoint | None = None) -> Work:
        if call.steps is not None:
            return super().run(call, over)
        tensor, others = call.outputs[0], [rank for rank in range(self.size) if rank != self.rank]
        got = [torch.empty_like(tensor) for _ in others]
        receives = [Recv(t, rank, COLLECTIVE_TAG) for t, rank in zip(got, others, strict=True)]
        self.post([*receives, *(Send(tensor, rank, COLLECTIVE_TAG) for rank in others)]).wait(1.0)
        for contribution in got:
            tensor += contribution
        work = Completion(1.0)
        work.complete()
        return work
