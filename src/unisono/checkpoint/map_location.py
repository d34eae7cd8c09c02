"""Destinations of loaded tensors: devices by `map_location`, and memory to copy bytes into."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from unisono.checkpoint.dtypes import as_bytes, memory_of
from unisono.checkpoint.manifest import TensorEntry

__all__ = ["Destination", "MapLocation", "check_location", "device_for"]

MapLocation = str | torch.device | Mapping[str, str] | Callable[[Any, str], Any] | None


def device_for(saved: str, map_location: MapLocation) -> torch.device:
    """Return the device for a tensor that was saved from device `saved`.

    Args:
        saved: A device name such as "cpu" or "cuda:0".
        map_location: As for `torch.load`: a device, a dict from saved devices to others (all other devices are
            kept), or a function of a storage and a saved device that returns a storage, or None to leave it. But
            `map_location=None` is the CPU.

    Example:
        >>> device_for("cuda:0", {"cuda:0": "cpu"})
        device(type='cpu')
    """
    if map_location is None:
        return torch.device("cpu")
    if isinstance(map_location, (str, torch.device)):
        return torch.device(map_location)
    if isinstance(map_location, Mapping):
        return torch.device(map_location.get(saved, saved))
    moved = map_location(torch.UntypedStorage(0), saved)
    if moved is not None and not isinstance(moved, (torch.UntypedStorage, torch.TypedStorage)):
        raise TypeError(f"map_location returned {moved!r:.80}; as for torch.load, it returns a storage, or None")
    return torch.device(saved if moved is None else moved.device)


def check_location(map_location: MapLocation) -> None:
    """Raise TypeError or ValueError for what is no `map_location`."""
    if isinstance(map_location, Mapping):
        named: list[object] = list(map_location.values())
    elif callable(map_location) or map_location is None:
        named = []
    else:
        named = [map_location]
    for name in named:
        if not isinstance(name, (str, torch.device)):
            raise TypeError(f"map_location is a device, a dict of devices or a function, not {map_location!r:.80}")
        try:
            torch.device(name)
        except RuntimeError as error:
            raise ValueError(f"map_location={map_location!r:.80}: {error}") from error


class Destination:
    """Memory for one tensor's bytes, and the tensor once all have arrived.

    Args:
        entry: The tensor's metadata.
        target: A tensor of the same shape and dtype to fill, or None.
        map_location: Device of a new tensor if `target` is None.
        start: Place of its first byte among those that are put; bytes outside are ignored.
    """

    def __init__(
        self, entry: TensorEntry, target: torch.Tensor | None, map_location: MapLocation, start: int = 0
    ) -> None:
        device = target.device if target is not None else device_for(entry.device, map_location)
        self._target = target
        made = target.detach() if target is not None else _blank(entry, device)
        flat = as_bytes(made)
        if target is not None and flat.data_ptr() != target.data_ptr():
            # Strided memory cannot be filled by runs of bytes: collect them first.
            made = _blank(entry, device)
            flat = as_bytes(made)
        self._made, self._flat, self._start = made, flat, start
        self._memory = memory_of(flat) if flat.device.type == "cpu" else None

    def put(self, offset: int, data: torch.Tensor) -> None:
        """Copy in uint8 values as the tensor's bytes from `offset` on."""
        low, high = max(offset, self._start), min(offset + data.numel(), self._start + self._flat.numel())
        if low < high:
            self._flat[low - self._start : high - self._start].copy_(data[low - offset : high - offset])

    def memory(self, offset: int, length: int) -> memoryview | None:
        """Writable view of these bytes of the tensor; None if not all of them are in its host memory."""
        first = offset - self._start
        inside = 0 <= first <= first + length <= self._flat.numel()
        return self._memory[first : first + length] if inside and self._memory is not None else None

    def tensor(self) -> torch.Tensor:
        """The tensor, filled."""
        if self._target is None:
            return self._made
        if self._made.data_ptr() != self._target.data_ptr():
            self._target.copy_(self._made)
        return self._target


def _blank(entry: TensorEntry, device: torch.device) -> torch.Tensor:
    # Created from bytes, because torch warns when it creates half-precision complex numbers.
    return torch.empty(entry.nbytes, dtype=torch.uint8, device=device).view(entry.dtype).view(entry.shape)
