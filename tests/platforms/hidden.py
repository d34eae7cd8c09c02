"""A stand-in for a process of another system: the names that only Linux, or only Unix, has are gone.

It cannot show how those systems behave; it shows that nothing here needs what they lack.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import selectors
import signal
import socket
import sys
import time
from types import ModuleType
from typing import Any, Literal

__all__ = ["Platform", "hide"]

Platform = Literal["darwin", "win32"]
_ONLY_LINUX: dict[ModuleType, str] = {
    os: """memfd_create MFD_CLOEXEC sched_getaffinity sched_setaffinity pidfd_open eventfd eventfd_read eventfd_write
        posix_fallocate posix_fadvise splice copy_file_range getrandom setns unshare getxattr O_PATH O_TMPFILE""",
    signal: "pidfd_send_signal SIGRTMIN SIGRTMAX SIGSTKFLT SIGPWR",
    socket: """SO_PEERCRED SO_BINDTODEVICE SO_DOMAIN SO_PROTOCOL SOCK_CLOEXEC SOCK_NONBLOCK TCP_KEEPIDLE
        TCP_USER_TIMEOUT AF_NETLINK AF_PACKET AF_VSOCK MSG_NOSIGNAL""",
    select: "epoll",
    mmap: "MAP_POPULATE MAP_ANONYMOUS MAP_STACK",
    time: "CLOCK_BOOTTIME CLOCK_MONOTONIC_RAW",
}
_ONLY_UNIX: dict[ModuleType, str] = {
    os: """fork forkpty register_at_fork geteuid getuid getegid getgid O_CLOEXEC O_NOFOLLOW O_NONBLOCK O_DIRECTORY
        sched_yield statvfs pread pwrite preadv pwritev mkfifo killpg getpgid setsid WNOHANG fchmod fchown chown
        getloadavg sysconf uname lockf posix_spawn""",
    signal: "SIGKILL SIGUSR1 SIGUSR2 SIGHUP SIGSTOP SIGCONT SIGCHLD SIGALRM SIGQUIT SIGPIPE setitimer pthread_kill",
    socket: "AF_UNIX SO_REUSEPORT sendmsg recvmsg send_fds recv_fds",
    select: "poll",
    mmap: "MAP_SHARED MAP_PRIVATE PROT_READ PROT_WRITE",
}
_NO_MODULES = ["fcntl", "pwd", "grp", "resource", "termios", "tty", "pty", "posix"]
_FOLDERS = "/proc", "/sys", "/dev/shm"


def hide(platform: Platform) -> None:
    """Turn this process into one of the platform, forever. Import what belongs to Python and torch before."""
    _remove(_ONLY_LINUX)
    selectors.DefaultSelector = selectors.SelectSelector
    sys.modules["unisono._native"] = None
    sys.addaudithook(_refuse_files)
    _load = ctypes.CDLL

    def load(name: str | None, *args: Any, **options: Any) -> ctypes.CDLL:
        library = _load(name, *args, **options)
        if name is None and platform == "win32":
            raise TypeError("Windows has no handle of the whole process")
        # The numbers of system calls are those of Linux.
        library.syscall = None
        return library

    ctypes.CDLL = load
    if platform == "win32":
        _remove(_ONLY_UNIX)
        socket.socketpair = _pair
        sys.modules.update(dict.fromkeys(_NO_MODULES))
    sys.platform = platform


def _remove(table: dict[ModuleType, str]) -> None:
    for module, names in table.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)


def _pair() -> tuple[socket.socket, socket.socket]:
    """Connect two sockets by TCP, as Python does on Windows."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = socket.create_connection(listener.getsockname())
        return first, listener.accept()[0]


def _refuse_files(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(args[0], str | bytes) and os.fsdecode(args[0]).startswith(_FOLDERS):
        raise FileNotFoundError(2, "No such file or directory", args[0])
