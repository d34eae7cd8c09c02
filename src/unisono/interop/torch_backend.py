"""Tells torch.distributed of a backend called "unisono", and makes its groups."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from unisono.errors import UnavailableError
from unisono.interop.group import UnisonoGroup
from unisono.interop.options import GroupOptions

__all__ = ["NAME", "register"]

NAME = "unisono"


def register() -> None:
    """Make `dist.init_process_group("unisono")` and `dist.new_group(backend="unisono")` work.

    Importing `unisono.interop` does it. Again is harmless.

    Raises:
        UnavailableError: This build of torch has no torch.distributed.

    Example:
        >>> register()
        >>> torch.distributed.is_backend_available("unisono")
        True
    """
    if not dist.is_available():
        raise UnavailableError("this build of torch has no torch.distributed; install another one")
    if NAME not in dist.Backend.backend_list:
        # A string of devices would be taken for a list of letters.
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(asked: Any, options: object = None) -> UnisonoGroup:
    """What torch calls on every member of a new group, with its own description of the group."""
    wishes = options if isinstance(options, GroupOptions) else GroupOptions()
    return UnisonoGroup(
        asked.store,
        asked.group_rank,
        asked.group_size,
        asked.timeout,
        wishes,
        others_options=None if options is wishes else options,
    )
