"""A transport that stages nothing: its ranks are threads, which copy between their tensors on a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.core.staging import ACCELERATORS, current_streams
from unisono.core.types import Message, Work
from unisono.transports.thread import InFlightMessage, ThreadTransport

__all__ = ["Direct"]


class Direct(ThreadTransport):
    """Copies between the ranks' own tensors, on the current stream: the engine's streams without staging."""

    devices, host_staged = ACCELERATORS, frozenset[str]()

    def post(self, batch: Sequence[Message]) -> Work:
        settle(*(message.tensor for message in batch))
        return super().post(batch)

    def _deliver(self, message: InFlightMessage) -> None:
        message.expected.tensor.copy_(message.sent.tensor)
        settle(message.expected.tensor, message.sent.tensor)
        message.send.arrived(message.sent)
        message.recv.arrived(message.expected)


def settle(*tensors: torch.Tensor) -> None:
    for stream in current_streams(tensor.device for tensor in tensors):
        stream.synchronize()
