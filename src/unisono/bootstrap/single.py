"""A world of one: nothing in the arguments or the environment speaks of ranks."""

from __future__ import annotations

import itertools

from unisono.bootstrap.result import InitRequest, Rendezvous
from unisono.control import LocalHub
from unisono.control.process_exit import close_at_exit
from unisono.core.group import Group

__all__ = ["detected", "find"]

_numbers = itertools.count(1)


def detected(_request: InitRequest) -> bool:
    """Always: this is what is left."""
    return True


def find(_request: InitRequest) -> Rendezvous:
    """The place of the only rank. Costs nothing; no socket, no thread."""
    control = LocalHub().control()
    close_at_exit(control)
    name = f"alone{next(_numbers)}"
    control.join(Group.world(0, 1, name))
    return Rendezvous(0, 1, 0, control, None, "127.0.0.1", name, "no launcher and no init_method: a world of one")
