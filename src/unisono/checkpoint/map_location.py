"""Where loaded tensors go: devices by `map_location`, and memory that bytes can be put into."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from unisono.checkpoint.dtypes import as_bytes, memory_of
from unisono.checkpoint.manifest import TensorEntry

__all__ = ["Destination", "MapLocation", "check_location", "device_for"]

MapLocation = str | torch.device | Mapping[str, str] | Callable[[Any, str], Any] | None


def device_for(saved: str, map_location: MapLocation) -> torch.device:
    """Where a tensor that was saved from `saved` is to live.

    Args:
        saved: Such as "cpu" or "cuda:0".
        map_location: As for `torch.load`: a device, a dict from saved devices to others (the rest stays where it
            was), or a function of a storage and a saved device that returns a storage, or None to leave it. But None
            in place of all that is the CPU.

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
    """Memory for one tensor's bytes, and the tensor when they are all there.

    Args:
        entry: The tensor.
        place: A tensor of the same shape and dtype to be filled, or None.
        map_location: Where to make one if there is none.
    """

    def __init__(self, entry: TensorEntry, place: torch.Tensor | None, map_location: MapLocation) -> None:
        device = place.device if place is not None else device_for(entry.device, map_location)
        self._place = place
        made = place.detach() if place is not None else _blank(entry, device)
        flat = as_bytes(made)
        if place is not None and flat.data_ptr() != place.data_ptr():
            # Strided memory takes no runs of bytes: collect them first.
            made = _blank(entry, device)
            flat = as_bytes(made)
        self._made, self._flat = made, flat
        self._memory = memory_of(flat) if flat.device.type == "cpu" else None

    def put(self, offset: int, data: torch.Tensor) -> None:
        """These uint8 values are the tensor's bytes from `offset` on."""
        self._flat[offset : offset + data.numel()].copy_(data)

    def memory(self, offset: int, length: int) -> memoryview | None:
        """Where those of its bytes go, to be written there; None if that is not in this computer's main memory."""
        return None if self._memory is None else self._memory[offset : offset + length]

    def tensor(self) -> torch.Tensor:
        """The tensor, filled."""
        if self._place is None:
            return self._made
        if self._made.data_ptr() != self._place.data_ptr():
            self._place.copy_(self._made)
        return self._place


def _blank(entry: TensorEntry, device: torch.device) -> torch.Tensor:
    # Made of bytes, since torch warns of half-precision complex numbers when it makes some.
    return torch.empty(entry.nbytes, dtype=torch.uint8, device=device).view(entry.dtype).view(entry.shape)
