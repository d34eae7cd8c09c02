"""A transport that makes its calls as that of nccl does, on a stand-in of torch's group, which moves nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import unisono as un
from unisono.communicator import engine_of
from unisono.core.group import Group
from unisono.core.transport import Capabilities, Options, Transport
from unisono.transports.torch.transport import TorchTransport

__all__ = ["StandIn", "around", "device_of"]

WITHIN_S = 20.0


class Launched:
    """Torch's work of a call, which ends when an abort ends it, or at once."""

    def __init__(self, ended: threading.Event) -> None:
        self._ended = ended

    def wait(self) -> None:
        """Let the stream wait, which takes no time."""

    def is_completed(self) -> bool:
        return self._ended.is_set()


class Device:
    """Torch's group of nccl. Launches return at once.

    Attributes:
        launched: Names of the calls.
        blocks: Name of a call whose launch, and those of the calls after it, wait until the group is aborted.
        hangs: Whether kernels run until the group is aborted.
        aborted: Set by `abort`, as is `ended`, which `shutdown` sets, too.
    """

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.blocks = ""
        self.hangs = False
        self.aborted = threading.Event()
        self.ended = threading.Event()
        self._over = threading.Event()
        self._over.set()

    def __getattr__(self, name: str) -> Callable[..., Launched]:
        def launch(*_: Any) -> Launched:
            self.launched.append(name)
            if name == self.blocks:
                assert self.aborted.wait(WITHIN_S)
            return Launched(self.aborted if self.hangs else self._over)

        return launch

    def await_end(self) -> None:
        """Wait until the group has ended."""
        assert self.ended.wait(WITHIN_S)

    def abort(self) -> None:
        self.aborted.set()
        self.ended.set()

    def shutdown(self) -> None:
        self.ended.set()


class StandIn(TorchTransport):
    """The transport of nccl, for tensors of the fake device, or such as have no memory."""

    def __init__(self, inner: TorchTransport, kind: str) -> None:
        self.device = Device()
        self._kind = kind
        options = Options("nccl", kind, inner._options.timeout_s)
        super().__init__(inner.group, self.device, inner._control, options)
        self._inner = inner

    @classmethod
    def declared(cls, backend: str) -> Capabilities:
        return Capabilities(frozenset({"meta", "fake"}), frozenset(), cls.native)

    def split(self, group: Group) -> StandIn:
        return StandIn(self._inner.split(group), self._kind)

    def close(self) -> None:
        super().close()
        self._inner.close()

    def abort(self, cause: BaseException) -> None:
        super().abort(cause)
        self._inner.abort(cause)


def around(inner: Transport, kind: str = "meta") -> StandIn:
    """Put it in the place of a transport on gloo, for tensors of this kind of device."""
    assert isinstance(inner, TorchTransport)
    return StandIn(inner, kind)


def device_of(comm: un.Communicator) -> Device:
    """Return the device of a communicator on it."""
    transport = engine_of(comm).transport
    while not isinstance(transport, StandIn):
        transport = transport.inner  # type: ignore[attr-defined]  # a wrapper
    return transport.device
