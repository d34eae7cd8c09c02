"""Streams of accelerators: the caller's, and those of a communicator, on which its copies and reductions are queued."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

__all__ = ["ACCELERATORS", "OneStream", "StreamOrder", "current_streams", "entered", "wait_for"]

ACCELERATORS = frozenset({"cuda", "xpu", torch._C._get_privateuse1_backend_name()}) - {"privateuseone"}
"""Device types with streams and pinned memory: torch's own, and the one that a plug-in of torch has named."""


def current_streams(devices: Iterable[torch.device]) -> list[torch.Stream]:
    """Return this thread's current stream of each device that has streams."""
    return [torch.accelerator.current_stream(d) for d in dict.fromkeys(devices) if d.type in ACCELERATORS]


def wait_for(streams: Iterable[torch.Stream]) -> None:
    """Let later work on the current streams of their devices wait for what is queued on these streams now."""
    for stream in streams:
        torch.accelerator.current_stream(stream.device).wait_stream(stream)


@contextmanager
def entered(streams: Iterable[torch.Stream]) -> Iterator[None]:
    """Make these streams current in this thread, and restore the previous ones and the current device at the end."""
    # A stream object is a context manager of one thread at a time, so it is not entered itself.
    own = list(streams)
    if not own:
        yield
        return
    index, previous = torch.accelerator.current_device_index(), current_streams(stream.device for stream in own)
    try:
        for stream in own:
            torch.accelerator.set_stream(stream)
        yield
    finally:
        for stream in previous:
            torch.accelerator.set_stream(stream)
        torch.accelerator.set_device_index(index)


class OneStream:
    """Check that all work of a step on some devices is queued on one stream of each.

    Memory that is freed belongs to the stream on which it was allocated: another stream may still use it then.

    Args:
        devices: The devices.

    Attributes:
        on_cpu: Whether all of them are the CPU.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = tuple(devices)
        self.on_cpu = all(device.type == "cpu" for device in self._devices)
        self.begin()

    def begin(self) -> None:
        """Begin a step on the current streams."""
        self._streams = current_streams(self._devices)

    def check(self) -> None:
        """Raise `RuntimeError` unless the current streams are those of the step."""
        if current_streams(self._devices) != self._streams:
            raise RuntimeError(
                "a sharded model or optimizer was used on several streams in one step. Run the whole forward on one "
                "stream, or average with GradientAverager, which follows all streams"
            )


class StreamOrder:
    """Order of a call's work on accelerators: after what the caller had queued, and done when the call ends.

    The caller's stream may hold much later work by the time when another thread executes the call. So the call has
    streams of its own, which wait for the moment of the call.

    Args:
        own: Streams of the communicator, by device; those that are missing are added.
    """

    def __init__(self, own: dict[torch.device, torch.Stream]) -> None:
        self._own = own
        self._events: dict[torch.device, torch.Event] = {}

    def follow(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let the call's work on these tensors wait for what is queued now on the current streams of their devices."""
        for tensor in tensors:
            device = tensor.device
            if device.type in ACCELERATORS and device not in self._events:
                self._events[device] = torch.accelerator.current_stream(device).record_event()

    def entered(self) -> AbstractContextManager[None]:
        """Make the call's streams current."""
        return self._entered() if self._events else nullcontext()

    @contextmanager
    def _entered(self) -> Iterator[None]:
        streams = self._streams()
        for stream, event in zip(streams, self._events.values(), strict=True):
            stream.wait_event(event)
        with entered(streams):
            yield

    def synchronize(self) -> None:
        """Wait until the call's work on accelerators is done."""
        for stream in self._streams():
            stream.synchronize()

    def _streams(self) -> list[torch.Stream]:
        return [self._own.get(d) or self._own.setdefault(d, torch.Stream(device=d)) for d in self._events]
