"""Registration of the backend "unisono" with torch.distributed, and the creation of its groups.

Torch loads this module at the end of `import torch`, in every process of the Python environment. Therefore, this module
imports only the standard library when it is loaded; the rest of unisono is imported when the first group is created.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.interop.group import UnisonoGroup

__all__ = ["NAME", "autoload", "register"]

NAME = "unisono"


def register() -> None:
    """Make `dist.init_process_group("unisono")` and `dist.new_group(backend="unisono")` work.

    Torch calls this function through `autoload`. If autoloading is disabled (TORCH_DEVICE_BACKEND_AUTOLOAD=0),
    importing `unisono.interop` calls `register`. Idempotent.

    Raises:
        UnavailableError: This build of torch has no torch.distributed.

    Example:
        >>> register()
        >>> torch.distributed.is_backend_available("unisono")
        True
    """
    import torch.distributed as dist

    if not dist.is_available():
        from unisono.errors import UnavailableError

        raise UnavailableError("this build of torch has no torch.distributed; install another build")
    if NAME not in dist.Backend.backend_list:
        # Pass a list: torch would split a string into letters.
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def autoload() -> None:
    """Entry point in the group "torch.backends": register the backend while torch is being imported.

    A failure only causes a warning, because an error raised here would make `import torch` fail. A build of torch
    without torch.distributed is ignored.
    """
    try:
        import torch.distributed as dist

        if dist.is_available():
            register()
            if (setting := os.environ.get("UNISONO_WATCH", "0")) not in ("", "0"):
                from unisono.interop.call_watch import watch_at_init

                watch_at_init(setting)
    except Exception as error:
        with contextlib.suppress(Warning):
            warnings.warn(f"torch.distributed has no backend {NAME!r}, since {error!r}", RuntimeWarning, stacklevel=2)


def _create(description: Any, options: object = None) -> UnisonoGroup:
    """Create this rank's group object from torch's description of the group."""
    from unisono.interop.group import UnisonoGroup
    from unisono.interop.options import GroupOptions

    group_options = options if isinstance(options, GroupOptions) else GroupOptions()
    return UnisonoGroup(
        description.store,
        description.group_rank,
        description.group_size,
        description.timeout,
        group_options,
        others_options=None if options is group_options else options,
    )
