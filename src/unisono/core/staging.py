"""Conversion of a call's tensors to memory that a transport can use, and back."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import xxhash
from torch.autograd.graph import increment_version

from unisono.core.flight_recorder import callers_place, site_text
from unisono.core.tensors import copy_back
from unisono.errors import CommError, MismatchError

__all__ = [
    "ACCELERATORS",
    "BufferGuard",
    "Staging",
    "current_streams",
    "digest",
    "entered",
    "wait_for",
]


ACCELERATORS = frozenset({"cuda", "xpu", torch.device("privateuseone").type}) - {"privateuseone"}
"""Device types with streams and pinned memory: torch's own, and one that a torch plug-in has registered."""

_NO_STREAMS = nullcontext()


class Staging:
    """Conversion of a call's tensors to one-dimensional contiguous tensors, and back.

    Accelerator tensors that are staged in CPU memory are copied through pinned memory, on the communicator's streams.
    The copies are ordered after any work that the caller queued before the call, and are complete when the call ends. A
    call waits once for all inputs to be copied, and once for all results, but never for the whole device. The copies
    run on dedicated streams, which wait for the caller's stream only up to the point at which the call was made: by the
    time another thread performs the call, the caller may have queued much more work.

    Args:
        away: Device types whose tensors are staged in CPU memory.
        streams: The communicator's streams, by device; missing streams are added.

    Attributes:
        before: Functions to run once all inputs have been copied, before any data moves.
        after: Functions to run once all data has arrived.
    """

    def __init__(
        self, away: frozenset[str] = frozenset(), streams: dict[torch.device, torch.Stream] | None = None
    ) -> None:
        self._away = away
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._pinned: list[torch.Tensor] = []
        self._own = {} if streams is None else streams
        self._events: dict[torch.device, torch.Event] = {}
        self.before: list[Callable[[], object]] = []
        self.after: list[Callable[[], object]] = []

    # -- tensors -------------------------------------------------------------------------------
    def flat(self, tensor: torch.Tensor, *, read: bool, write: bool) -> torch.Tensor:
        """Return flat memory, filled from the tensor if `read`, and copied back to it later if `write`.

        Returns the tensor's own memory, without a copy, if the transport can use it.
        """
        tensor = tensor.detach()
        plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        # An inference tensor can only be written to in inference mode.
        plain = plain and not (write and tensor.is_inference() and not torch.is_inference_mode_enabled())
        if plain and tensor.device.type not in self._away:
            # Unlike view(-1), as_strided gives stride 1 even to a single element. With any other stride,
            # `view(torch.uint8)` would raise.
            flat = tensor.as_strided((tensor.numel(),), (1,))
            if write and not tensor.is_inference():
                # Most transports don't write through torch, so autograd has to be notified.
                self.after.append(partial(increment_version, flat))
            return flat
        flat = self.scratch(tensor.numel(), tensor)
        shaped = flat.view(tensor.shape)
        if tensor.device.type in self._away:
            self.follow([tensor])
        if read:
            self.copy_before(shaped, tensor)
        if write:
            self.after.append(partial(copy_back, tensor, shaped))
        return flat

    def scratch(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Return uninitialised flat memory of a tensor's dtype that the transport can use."""
        if like.device.type in self._away:
            # Pin the memory, so that an accelerator copies at full speed, without involving the host.
            pinned = like.device.type in ACCELERATORS
            self._pinned.append(torch.empty(numel, dtype=like.dtype, device="cpu", pin_memory=pinned))
            return self._pinned[-1]
        return torch.empty(numel, dtype=like.dtype, device=like.device)

    def write_back(self, buffer: list[Any], tensor: torch.Tensor) -> None:
        """Write the result back to the list of numbers that the tensor was copied from. Call after `flat`."""
        self.after.append(lambda: buffer.__setitem__(slice(None), tensor.tolist()))

    def copy_before(self, target: torch.Tensor, tensor: torch.Tensor) -> None:
        """Schedule a copy of a read-only tensor, to be made before any data moves."""
        if tensor.device.type in self._away:
            self.follow([tensor])
        self._copies.append((target, tensor.detach()))

    # -- the call ------------------------------------------------------------------------------
    def begin(self) -> None:
        """Copy the inputs, and run the functions in `before`."""
        for target, tensor in self._copies:
            # Resolve conjugation and negation first: otherwise, torch would do so in host memory, possibly before the
            # asynchronous copy has arrived there.
            target.copy_(tensor.resolve_conj().resolve_neg(), non_blocking=True)
        if self._copies:
            self._synchronize()
        for action in self.before:
            action()

    def end(self) -> None:
        """Run each of the functions in `after` once, and return when the results are in place."""
        while self.after:
            self.after.pop(0)()
        if self._events:
            self._synchronize()

    def follow(self, tensors: Iterable[torch.Tensor]) -> None:
        """Make the call's work on these tensors wait for the work queued so far on their devices' current streams."""
        for tensor in tensors:
            device = tensor.device
            if device.type in ACCELERATORS and device not in self._events:
                self._events[device] = torch.accelerator.current_stream(device).record_event()

    def entered(self) -> AbstractContextManager[None]:
        """Return a context in which the call's streams are current."""
        return self._entered() if self._events else _NO_STREAMS

    @contextmanager
    def _entered(self) -> Iterator[None]:
        streams = self._streams()
        for stream, event in zip(streams, self._events.values(), strict=True):
            stream.wait_event(event)
        try:
            with entered(streams):
                yield
        except RuntimeError as error:
            if not isinstance(error, CommError):
                # A kernel has failed. Leak the pinned memory: if it were freed now, torch would abort the process
                # before the error is reported.
                for pinned in self._pinned:
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(pinned))
            raise

    def _synchronize(self) -> None:
        """Wait until the call's accelerator work is done."""
        for stream in self._streams():
            stream.synchronize()

    def _streams(self) -> list[torch.Stream]:
        return [self._own.get(d) or self._own.setdefault(d, torch.Stream(device=d)) for d in self._events]


def current_streams(devices: Iterable[torch.device]) -> list[torch.Stream]:
    """Return this thread's current stream for each device that has streams."""
    return [torch.accelerator.current_stream(d) for d in dict.fromkeys(devices) if d.type in ACCELERATORS]


def wait_for(streams: Iterable[torch.Stream]) -> None:
    """Make each device's current stream wait for the work queued so far on the given streams of that device."""
    for stream in streams:
        torch.accelerator.current_stream(stream.device).wait_stream(stream)


@contextmanager
def entered(streams: Iterable[torch.Stream]) -> Iterator[None]:
    """Make these streams current in this thread; restore the previous streams and the current device on exit."""
    # Don't enter the stream objects themselves: only one thread at a time can enter a stream object.
    own = list(streams)
    if not own:
        yield
        return
    index = torch.accelerator.current_device_index()
    previous = current_streams(stream.device for stream in own)
    try:
        for stream in own:
            torch.accelerator.set_stream(stream)
        yield
    finally:
        for stream in previous:
            torch.accelerator.set_stream(stream)
        torch.accelerator.set_device_index(index)


def digest(tensor: torch.Tensor) -> int:
    """Return a 64-bit XXH3 hash of a tensor's elements in order; a GPU tensor is copied to the CPU first."""
    here = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    if not here.numel():
        return 0
    return xxhash.xxh3_64_intdigest((ctypes.c_char * here.nbytes).from_address(here.data_ptr()))


class BufferGuard(Staging):
    """Staging that sends copies, and detects changes to the caller's tensors during the call.

    Cost: a copy and two hashes of every tensor.

    Args:
        away, streams: See `Staging`.
    """

    def __init__(self, away: frozenset[str], streams: dict[torch.device, torch.Stream]) -> None:
        super().__init__(away, streams)
        self._place = callers_place()

    def flat(self, tensor: torch.Tensor, *, read: bool, write: bool) -> torch.Tensor:
        tensor = tensor.detach()
        flat = self.scratch(tensor.numel(), tensor)
        shaped = flat.view(tensor.shape)
        # Tensors that are read are compared by `copy_before`. In both cases, compare before the result is copied back.
        if read:
            self.copy_before(shaped, tensor)
        else:
            self._guard(tensor)
        if write:
            self.after.append(partial(copy_back, tensor, shaped))
        return flat

    def copy_before(self, target: torch.Tensor, tensor: torch.Tensor) -> None:
        # Copy now: a queued call begins later, and a change meanwhile must not reach other ranks.
        target.copy_(tensor.detach())
        # An accelerator has made the copy once `_guard` has read the tensor.
        self._guard(tensor)

    def _guard(self, tensor: torch.Tensor) -> None:
        """Compare the tensor with its present elements when the call ends."""
        self.follow([tensor])
        self.after.append(partial(self._compare, tensor, digest(tensor)))

    def _compare(self, tensor: torch.Tensor, before: int) -> None:
        if digest(tensor) != before:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise MismatchError(
                f"a tensor of the call at {site_text(self._place)} (shape {tuple(tensor.shape)}, {kind}) was changed "
                "between the call and the end of its wait(); it belongs to the call until then"
            )
