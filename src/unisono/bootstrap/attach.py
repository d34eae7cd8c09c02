"""Address of the control plane of a running job."""

from __future__ import annotations

from unisono.bootstrap.file import address_in
from unisono.bootstrap.tcp import address_of
from unisono.control.inspect_socket import find_control
from unisono.control.secret import find_secret

__all__ = ["find_running"]


def find_running(
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
    raise ValueError(
        f"unknown init_method {url!r} for a job that is running; give tcp://host:port, file:///path, or a pid"
    )
