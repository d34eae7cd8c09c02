"""`join`, which adds a rank to a running job."""

from __future__ import annotations

import torch

from unisono.bootstrap.file import address_in
from unisono.bootstrap.tcp import address_of
from unisono.communicator import Communicator
from unisono.control.client import SocketControl
from unisono.control.inspect_socket import find_control
from unisono.control.sockets import find_secret
from unisono.core import clock
from unisono.core.types import Timeout
from unisono.core.work import positive_timeout
from unisono.launcher.api import TIMEOUT_S, Wrap
from unisono.launcher.replacement import admitted

__all__ = ["join"]


def join(
    init_method: str | None = None,
    *,
    pid: int | None = None,
    timeout: Timeout = TIMEOUT_S,
    device: str | torch.device | None = None,
    secret: str | bytes | None = None,
    wrap: Wrap | None = None,
) -> Communicator:
    """Join a running job as an additional rank, when the job's ranks call `comm.rebuild` with `grow` or `size`.

    The job determines the backend, default timeout, chunk size and checks. The new rank gets the highest rank number.

    Args:
        init_method: The `init_method` that the job's ranks passed to `init`: "tcp://host:port" or "file:///path".
        pid: PID of any rank's process or of the launching process, in place of `init_method`. The process must run on
            this host as the same user.
        timeout: Maximum time until the job's ranks admit this rank, in seconds or as a `timedelta`.
        device: As for `init`.
        secret: The job's secret, as for `init`; not needed with `pid` or "file:///path".
        wrap: As for `init`.

    Returns:
        The communicator of the job's ranks and all new ranks. Closing the communicator also closes this process's
        control connection.

    Raises:
        ValueError: Neither or both of `init_method` and `pid` were passed, or `timeout` is not a positive number.
        CommTimeoutError: The job's ranks did not call `rebuild` with `grow` or `size`.
        CommError: The job does not exist, or the secrets differ.

    Example:
        >>> un.join(pid=2**22, timeout=0.1)
        Traceback (most recent call last):
        ...
        unisono.errors.CommError: process 4194304 is in no unisono job that this user may query ...
    """
    timeout_s = positive_timeout(timeout)
    if (init_method is None) == (pid is None):
        raise ValueError("pass either an init_method, as the job's ranks did, or the pid of one of its processes")
    address, known, host_rank = _find_running(init_method, pid, secret)
    control = SocketControl(address, known, timeout_s, host_rank=host_rank)
    try:
        comm = admitted(control, clock.now() + timeout_s, "cpu" if device is None else str(device), wrap)
    except BaseException:
        control.close()
        raise
    comm.after_close(control.close)
    return comm


def _find_running(
    init_method: str | None, pid: int | None, secret: str | bytes | None
) -> tuple[tuple[str, int], bytes, int | None]:
    """Return the job's address and secret, and, if known, the rank that hosts its control plane.

    Raises:
        ValueError: The init method has no address.
        CommError: There is no job at the address, or no job has a process with this PID.
    """
    if pid is not None:
        return *find_control(pid), None
    url = init_method or ""
    if url.startswith("file://"):
        return *address_in(url), 0
    if url.startswith("tcp://"):
        return address_of(url), find_secret(secret), 0
    raise ValueError(f"unknown init_method {url!r} for a running job; pass tcp://host:port, file:///path, or a pid")
