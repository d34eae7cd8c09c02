"""`join`: how a newcomer gets into a job that is running."""

from __future__ import annotations

import logging
import time

import torch

from unisono import serialization
from unisono.bootstrap.file import address_in
from unisono.bootstrap.tcp import address_of
from unisono.communicator import Communicator
from unisono.control.client import SocketControl
from unisono.control.inspect_socket import find_control
from unisono.control.sockets import find_secret
from unisono.core.failure import to_cause
from unisono.core.group import Group
from unisono.core.transport import Options
from unisono.core.types import Timeout
from unisono.core.work import positive_timeout, seconds_left
from unisono.errors import AbortedError, CommError, MismatchError
from unisono.launcher.api import TIMEOUT_S, Wrap
from unisono.transports.hierarchical import transport_named

__all__ = ["join"]

_log = logging.getLogger("unisono")


def join(
    init_method: str | None = None,
    *,
    pid: int | None = None,
    timeout: Timeout = TIMEOUT_S,
    device: str | torch.device | None = None,
    secret: str | bytes | None = None,
    wrap: Wrap | None = None,
) -> Communicator:
    """Become one more rank of a running job, when its ranks call `comm.rebuild(grow=...)`.

    Backend, default timeout, chunk size and checks are those of the job. The newcomer's rank is the last one.

    Args:
        init_method: As the job's ranks gave it to `init`: "tcp://host:port" or "file:///path".
        pid: Instead of `init_method`: a process of the job on this host, of this user: any rank, or the process that
            launched the ranks.
        timeout: Time until the job's ranks admit this one: seconds or a `timedelta`.
        device: As for `init`.
        secret: As for `init`; not needed with `pid` or a file.
        wrap: As for `init`.

    Returns:
        The communicator, of the job's ranks and all newcomers; its `close` also ends this process's control client.

    Raises:
        ValueError: Neither `init_method` nor `pid` was passed, or both; or `timeout` is not a positive number.
        CommTimeoutError: The job's ranks have not called `rebuild(grow=...)`.
        CommError: There is no such job, or the secrets differ.

    Example:
        >>> un.join(pid=1, timeout=0.1)
        Traceback (most recent call last):
        ...
        unisono.errors.CommError: process 1 is in no unisono job that this user may query ...
    """
    timeout_s = positive_timeout(timeout)
    if (init_method is None) == (pid is None):
        raise ValueError("pass either an init_method, as the job's ranks did, or the pid of one of its processes")
    address, known, host_rank = _find_running(init_method, pid, secret)
    control = SocketControl(address, known, timeout_s, host_rank=host_rank)
    try:
        comm = _taken_in(control, time.monotonic() + timeout_s, device, wrap)
    except BaseException:
        control.close()
        raise
    comm.after_close(control.close)
    return comm


def _find_running(
    init_method: str | None, pid: int | None, secret: str | bytes | None
) -> tuple[tuple[str, int], bytes, int | None]:
    """Address and secret, and which rank hosts it, if one is known to.

    Raises:
        ValueError: The init method names no place.
        CommError: There is nothing there.
    """
    if pid is not None:
        return *find_control(pid), None
    url = init_method or ""
    if url.startswith("file://"):
        return *address_in(url), 0
    if url.startswith("tcp://"):
        return address_of(url), find_secret(secret), 0
    raise ValueError(f"unknown init_method {url!r} for a running job; pass tcp://host:port, file:///path, or a pid")


def _taken_in(
    control: SocketControl, deadline: float, device: str | torch.device | None, wrap: Wrap | None
) -> Communicator:
    """Apply until it goes well: ranks may be lost while the new communicator is made, and then all try again."""
    while True:
        rebuilt, rank, terms = control.request_admission(seconds_left(deadline))
        backend, default_s, chunk_bytes, deterministic, check = serialization.decode(terms)
        group = Group(rebuilt.name, rank, rebuilt.members)
        where = "cpu" if device is None else str(device), default_s, control.local_host
        options = Options(backend, *where, chunk_bytes, deterministic)
        _log.info("unisono: rank %d of %d, joined %s", rank, group.size, group.name)
        control.join(group)
        try:
            transport = transport_named(backend).connect(group, control, options)
            comm = Communicator(wrap(transport) if wrap else transport, control, options, check=check)
            control.exchange(group, "rebuilt", None, max(1.0, deadline - time.monotonic()))
        except BaseException as error:
            control.report_failure(group, to_cause(error, rank, "join"))
            control.leave(group)
            again = isinstance(error, CommError) and not isinstance(error, AbortedError | MismatchError)
            if not again or time.monotonic() > deadline:
                raise
        else:
            return comm
