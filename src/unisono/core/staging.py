"""Conversion of a call's tensors to memory that a transport can use, and of the results back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.autograd.graph import increment_version

from unisono.core.streams import ACCELERATORS, StreamOrder
from unisono.core.tensors import copy_back, is_inference_locked

__all__ = ["Staging"]


class Staging:
    """Conversion of the tensors of a call to one-dimensional contiguous ones, and of the results back.

    Tensors on accelerators that are staged in CPU memory are copied through pinned memory, on streams of the
    communicator: the copies follow what the caller had queued at the call, and are done when the call ends. A call
    waits for its own copies only, never for the whole device: once for all inputs, and once for all results.

    Args:
        away: Device types with tensors that are staged in CPU memory.
        streams: As `own` of `StreamOrder`.

    Attributes:
        order: Order of the call's work on accelerators.
        before: Functions to run before any data moves, when all inputs have been copied.
        after: Functions to run when all data has arrived.
    """

    def __init__(
        self, away: frozenset[str] = frozenset(), streams: dict[torch.device, torch.Stream] | None = None
    ) -> None:
        self._away = away
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.order = StreamOrder({} if streams is None else streams)
        self.before: list[Callable[[], object]] = []
        self.after: list[Callable[[], object]] = []

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        """Flat memory with the tensor's elements: the tensor's own where possible."""
        return self._flat(tensor, read=True, write=False)

    def target(self, tensor: torch.Tensor, *, read: bool = False) -> torch.Tensor:
        """Return flat memory to be copied to the tensor; it holds the present elements if `read`."""
        return self._flat(tensor, read=read, write=True)

    def scratch(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Uninitialised flat memory of a tensor's dtype, where the transport can use it."""
        if like.device.type in self._away:
            # Pinned memory is what an accelerator copies to and from at full speed, and without the host.
            pinned = like.device.type in ACCELERATORS
            return torch.empty(numel, dtype=like.dtype, device="cpu", pin_memory=pinned)
        return torch.empty(numel, dtype=like.dtype, device=like.device)

    def write_back(self, buffer: object, tensor: torch.Tensor) -> None:
        """Return the result to a list of numbers, of which the tensor is a copy. Call after `target`.

        Other buffers share their memory with the tensor.
        """
        if isinstance(buffer, list):
            self.after.append(lambda: buffer.__setitem__(slice(None), tensor.tolist()))

    def copy_before(self, target: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy a tensor that is only read, before anything moves."""
        if tensor.device.type in self._away:
            self.order.follow([tensor])
        self._copies.append((target, tensor.detach()))

    def begin(self) -> None:
        """Copy the inputs, and run the functions that come before any data moves."""
        for target, tensor in self._copies:
            target.copy_(tensor, non_blocking=True)
        if self._copies:
            self.order.synchronize()
        for action in self.before:
            action()

    def end(self) -> None:
        """Run the functions that come when all data has arrived, each once; return when the results are in place."""
        while self.after:
            self.after.pop(0)()
        self.order.synchronize()

    def _flat(self, tensor: torch.Tensor, *, read: bool, write: bool) -> torch.Tensor:
        tensor = tensor.detach()
        plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        # One of inference mode can be written to in that mode alone.
        plain = plain and not (write and is_inference_locked(tensor))
        if plain and tensor.device.type not in self._away:
            # Unlike view(-1), this has stride 1 also where there is only one element: else it has no bytes to view.
            flat = tensor.as_strided((tensor.numel(),), (1,))
            if write and not tensor.is_inference():
                # Few transports write by torch's functions, which autograd hears of.
                self.after.append(partial(increment_version, flat))
            return flat
        flat = self.scratch(tensor.numel(), tensor)
        shaped = flat.view(tensor.shape)
        if tensor.device.type in self._away:
            self.order.follow([tensor])
        if read:
            self.copy_before(shaped, tensor)
        if write:
            self.after.append(lambda: copy_back(tensor, shaped))
        return flat
