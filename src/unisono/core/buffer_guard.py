"""Detection of changes to a call's tensors while it runs, for `check="full"`."""

from __future__ import annotations

import ctypes

import torch
import xxhash

from unisono.core.staging import Staging
from unisono.core.tensors import copy_back
from unisono.errors import MismatchError

__all__ = ["BufferGuard", "digest"]


def digest(tensor: torch.Tensor) -> int:
    """Return a hash (XXH3, 64 bits) of a tensor's elements in order; a GPU tensor is copied to the CPU first."""
    here = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    if not here.numel():
        return 0
    return xxhash.xxh3_64_intdigest((ctypes.c_char * here.nbytes).from_address(here.data_ptr()))


class BufferGuard(Staging):
    """Staging that moves copies made at the call, and detects changes of the caller's own tensors meanwhile.

    Cost: a copy and two hashes of every tensor.

    Args:
        away, streams: As for `Staging`.
        where: The call, for the message: "the call at train.py:12".
    """

    def __init__(self, away: frozenset[str], streams: dict[torch.device, torch.Stream], where: str) -> None:
        super().__init__(away, streams)
        self._where = where

    def _flat(self, tensor: torch.Tensor, *, read: bool, write: bool) -> torch.Tensor:
        tensor = tensor.detach()
        flat = self.scratch(tensor.numel(), tensor)
        shaped, before = flat.view(tensor.shape), digest(tensor)
        self.order.follow([tensor])
        if read:
            shaped.copy_(tensor)
        self.after.append(lambda: self._compare(tensor, before))
        if write:
            self.after.append(lambda: copy_back(tensor, shaped))
        return flat

    def copy_before(self, target: torch.Tensor, tensor: torch.Tensor) -> None:
        super().copy_before(target, tensor)
        before = digest(tensor)
        self.after.append(lambda: self._compare(tensor, before))

    def _compare(self, tensor: torch.Tensor, before: int) -> None:
        if digest(tensor) != before:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise MismatchError(
                f"a tensor of {self._where} (shape {tuple(tensor.shape)}, {kind}) was changed between the call and the "
                "end of its wait(); it belongs to the call until then"
            )
