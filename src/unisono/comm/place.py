"""Rank, size, backend and device of a communicator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from unisono.comm.engine import Engine
    from unisono.core.transport import Options

__all__ = ["Place"]


class Place:
    """Base class of `Communicator`, in its own file, because Dynamo may trace this file but not `communicator.py`."""

    _engine: Engine
    _options: Options

    @property
    def rank(self) -> int:
        """This rank, from 0 to `size` - 1."""
        return self._engine.group.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._engine.group.size

    @property
    def backend(self) -> str:
        """Name of the transport: "thread", "gloo", ..."""
        return self._options.backend

    @property
    def device(self) -> torch.device:
        """Default device of this communicator's tensors."""
        return torch.device(self._engine.options.device)
