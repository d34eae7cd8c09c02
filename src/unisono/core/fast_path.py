"""Interface of a transport's fast path: a blocking call that is one native call."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias

from unisono.core.fingerprint import Fingerprint

if TYPE_CHECKING:
    from unisono.core.buffers import Buffer
    from unisono.core.collective import Collective

__all__ = ["FastPath", "Status", "Tensors"]

Tensors: TypeAlias = "Buffer | Sequence[Buffer] | None"


class Status(IntEnum):
    """Status of a native call, with the numbers of src/native/shm/barrier.hpp."""

    OK = 0
    MISMATCH = 1
    TIMEOUT = 2
    PEER_LEFT = 3
    ABORTED = 4
    UNSUPPORTED = 6


class FastPath(Protocol):
    """Blocking calls on the caller's own tensors, in one native call each.

    They interoperate with `Transport.collective` on other ranks, so ranks need not agree on the path, and they
    compare fingerprints themselves.
    """

    def collective(
        self, what: Collective, output: Tensors, input: Tensors, op: object, root: int | None, deadline: float
    ) -> Status:
        """Make the call. Return `UNSUPPORTED`, with no effect, for the general path; `MISMATCH` if ranks' calls differ.

        Args:
            what: The collective.
            output: What is written, as the caller gave it: a tensor or one a rank; None where nothing is.
            input: What is read, where that is something else.
            op, root: As the caller gave them, where there are such.
            deadline: On the monotonic clock.
        """
        ...

    def mismatch(self, fingerprint: Fingerprint) -> NoReturn:
        """Raise the `MismatchError` that quotes each rank's fingerprint. All ranks call it."""
        ...

    def takes(self, tensor: Any, peer: int, tag: int) -> bool:
        """Return whether a message can be sent or received now. All arguments are the caller's own."""
        ...

    def message(self, name: str, tensor: Any, peer: int, tag: int, deadline: float) -> Status:
        """Send or receive ("send", "recv") a tensor; return `UNSUPPORTED`, with no effect, for the general path."""
        ...
