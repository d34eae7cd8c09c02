"""Does not end waits when the communicator is aborted."""

from __future__ import annotations

from unisono.core.transport import Transport
from unisono.wrappers.base import Wrapper

CHECK = "abort_ends_every_wait"
ERROR = "the wait went on after the abort"


class Mutant(Wrapper):
    def wrap_child(self, inner: Transport) -> Mutant:
        return Mutant(inner)

    def abort(self, cause: BaseException) -> None:
        pass
