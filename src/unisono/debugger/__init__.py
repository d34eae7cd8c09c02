"""Debugger that stops all ranks, inspects any of them, and lets them continue.

Provisional: it may change in any minor version, without a deprecation.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from threading import get_ident

from unisono.communicator import Communicator, engine_of
from unisono.core.flight_recorder import call_site
from unisono.core.hold import HOLD, SUSPENDABLE, can_hold, hold_ranks
from unisono.debugger.prompt import Prompt
from unisono.debugger.session import Session, attach
from unisono.errors import CommError, UnavailableError

__all__ = ["Session", "attach", "breakpoint"]


def breakpoint(comm: Communicator | None = None) -> None:  # noqa: A001  # like Python's, for all ranks
    """Stop this rank here, and all other ranks at their next communicator call, until a debugger lets them continue.

    Provisional: it may change in any minor version, without a deprecation.

    Deadlines are suspended while ranks are held. If the ranks are threads of this process, or simulated, and standard
    input is a terminal, the debugger's prompt appears in that terminal. If there is no prompt, attach as the same user
    from another terminal on this host with `unisono debug PID`, or from Python with `attach`. If the job has several
    hosts, attach on each host to the ranks on that host. While ranks are held, each process has a Unix socket through
    which other processes of the same user (checked by the kernel) can run code in it. With PYTHONBREAKPOINT=0, this
    function does nothing, like Python's `breakpoint`.

    Args:
        comm: A communicator of the job. If None, a communicator that this thread has created or used.

    Raises:
        UnavailableError: Deadlines cannot be suspended: the communicator's backend is not shm, tcp, thread or sim, or
        the platform is not Linux.
        CommError: This thread has neither created nor used a communicator, or the debugger has ended the job.

    Example:
        >>> def program(comm):
        ...     loss = 0.5 + comm.rank
        ...     un.breakpoint(comm)
        >>> # In a terminal: unisono debug, then `all loss`, `go`
    """
    if os.environ.get("PYTHONBREAKPOINT") == "0":
        return
    engines = HOLD.engines_of(get_ident()) if comm is None else [engine_of(comm)]
    if not engines:
        raise CommError("no communicator belongs to this thread yet: pass one to unisono.breakpoint")
    engine = engines[0]
    engine.failures.check("breakpoint")
    if not can_hold(engine.options.backend):
        raise UnavailableError(
            f"ranks are held on {', '.join(sorted(SUSPENDABLE))}, on Linux, where deadlines can stand still; "
            f"not on {engine.options.backend}"
        )
    rank = engine.group.members[engine.group.rank]
    prompts = engine.transport.in_process and sys.stdin is not None and sys.stdin.isatty()
    why = f"has reached a breakpoint at {call_site()}"
    hold_ranks(engine.control, engine.activity, why, partial(_show, rank) if prompts else None)
    engine.failures.check("breakpoint")


def _show(rank: int) -> None:
    with attach(os.getpid()) as session:
        Prompt(session, rank, lets_go=True).cmdloop()
