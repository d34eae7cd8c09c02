"""Logging from one rank, or with the rank in front."""

from __future__ import annotations

import logging
from collections.abc import Collection, MutableMapping
from typing import TYPE_CHECKING, Any

from unisono.communicator import Communicator

__all__ = ["rank_logger"]

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


def rank_logger(
    logger: logging.Logger | str, comm: Communicator, ranks: Collection[int] | None = None
) -> logging.LoggerAdapter[logging.Logger]:
    """Return an adapter of a logger that is silent on other ranks, or puts the rank in front of messages.

    The logger itself stays as it is, so that ranks that are threads can share it. Records have the attributes
    `rank` and `size`, for formatters such as `"%(rank)s %(message)s"`.

    Args:
        logger: A logger, or the name of one.
        comm: The ranks.
        ranks: The ranks that log; None for all. If it is a single one, messages stay as they are.

    Raises:
        ValueError: One of `ranks` is not a rank of `comm`.

    Example:
        >>> def program(comm):
        ...     everywhere = un.utils.rank_logger("training", comm)
        ...     once = un.utils.rank_logger("training", comm, ranks=[0])
        ...     return everywhere.process("began", {})[0], once.isEnabledFor(logging.WARNING)
        >>> import logging
        >>> un.launch(program, 2, "thread")
        [('[rank 0 of 2] began', True), ('[rank 1 of 2] began', False)]
    """
    for rank in ranks or ():
        if rank not in range(comm.size):
            raise ValueError(f"{rank!r} is not a rank: these are 0 to {comm.size - 1}")
    known = logging.getLogger(logger) if isinstance(logger, str) else logger
    return _RankAdapter(known, comm.rank, comm.size, ranks)


class _RankAdapter(_Adapter):
    """Adapter of one rank."""

    def __init__(self, logger: logging.Logger, rank: int, size: int, ranks: Collection[int] | None) -> None:
        super().__init__(logger, {"rank": rank, "size": size})
        self._logs = ranks is None or rank in ranks
        self._prefix = "" if ranks is not None and len(ranks) == 1 else f"[rank {rank} of {size}] "

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802
        return self._logs and super().isEnabledFor(level)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return f"{self._prefix}{msg}", {**kwargs, "extra": {**(kwargs.get("extra") or {}), **(self.extra or {})}}
