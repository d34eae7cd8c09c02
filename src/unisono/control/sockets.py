"""Sockets configured for the control plane, and errors for sockets that cannot be opened."""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import select
import socket
import stat
import struct
import sys
import tempfile
import time
from pathlib import Path

from unisono.core.frames import FrameChannel
from unisono.errors import CommError, UnavailableError
from unisono.host.files import write_aside
from unisono.host.network import is_name, means_here

__all__ = [
    "FAR_S",
    "HELLO_BYTES",
    "PORT_RANGE",
    "PROOF_BYTES",
    "RANK_BYTES",
    "Hello",
    "check_platform",
    "find_secret",
    "limit_silence",
    "listen",
    "outage",
    "port_range",
    "refuse_if_shared",
    "round_trip_s",
    "secret_bytes",
    "tune",
]

_OUTAGE_S = 86_400
"""Longest link outage, in seconds, that a connection survives; waits on it still end at their own deadlines."""
_IDLE_S = 10
"""Seconds between probes of an idle connection, so that firewalls on the path do not drop it."""
_PROBE_S = 1
"""Seconds between probes of a connection with a limit on silence."""
_RETRIES = {16: 1, 44: 1000}
"""TCP_THIN_LINEAR_TIMEOUTS, and, on Linux 6.15 and newer, TCP_RTO_MAX_MS, for which Python has no names."""
_MOST_MISSED = 2.5
"""Number of probes that may be lost before a connection's host counts as unreachable."""
FAR_S = 0.005
"""Minimum round-trip time, in seconds, of a link that counts as long."""
_LAST_ACK_AT = 56
"""Offset of tcpi_last_ack_recv, in milliseconds, in the kernel's struct tcp_info."""
_ROUND_TRIP_AT = 68
"""Offset of tcpi_rtt, in microseconds, in the same struct."""


def check_platform() -> None:
    """Raise `UnavailableError` on platforms where processes cannot be ranks."""
    if not hasattr(select, "poll"):
        raise UnavailableError(
            "ranks that are processes need select.poll, which Windows does not have; use backend='thread' or 'sim', "
            "or run the program in WSL"
        )


def tune(peer: socket.socket) -> None:
    """Disable Nagle's algorithm, survive link outages, and use the full bandwidth of links with a long round trip.

    A connection does not end just because its peer isn't reading or cannot be reached: calls have deadlines, and the
    control plane watches hosts; see `limit_silence`.
    """
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    limit_silence(peer, _OUTAGE_S, _IDLE_S)
    if sys.platform == "linux":
        # By default, intervals between retransmissions double, so the next retry may be up to two minutes after a link
        # has recovered.
        for option, value in _RETRIES.items():
            with contextlib.suppress(OSError):
                peer.setsockopt(socket.IPPROTO_TCP, option, value)
    if round_trip_s(peer) >= FAR_S:
        # BBR sends at the rate that it measures. Other algorithms treat each lost packet as congestion: on a 50 Mbit/s
        # link with a round trip of 100 ms and 0.1 % loss, cubic gets 4 Mbit/s, and 38 Mbit/s with eight connections.
        # Not every kernel has or allows BBR.
        with contextlib.suppress(OSError):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")


def limit_silence(peer: socket.socket, silence_s: float, probe_s: int = _PROBE_S) -> None:
    """End a connection once the host at the other end has been silent for `silence_s`, plus up to `probe_s` seconds.

    The hosts' kernels send and answer the probes, so a process that is computing or stopped does not count as silent. A
    peer that accepts no bytes because its buffers are full also counts as silent.

    Args:
        peer: The connection.
        silence_s: Seconds that the host may be silent.
        probe_s: Seconds between probes, while nothing else is sent.
    """
    options = {
        "TCP_KEEPALIVE": probe_s,
        "TCP_KEEPIDLE": probe_s,
        "TCP_KEEPINTVL": probe_s,
        # TCP_KEEPCNT takes effect only on kernels without TCP_USER_TIMEOUT.
        "TCP_KEEPCNT": max(1, int(silence_s / probe_s)),
        "TCP_USER_TIMEOUT": int(min(silence_s, _OUTAGE_S) * 1000),
    }
    for name, value in options.items():
        if hasattr(socket, name):
            with contextlib.suppress(OSError):
                peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def outage(peer: socket.socket, host: str, error: BaseException | None = None) -> str:
    """Return how long the host at the other end of a connection has been silent, as a sentence.

    Args:
        peer: A connection watched with `limit_silence`.
        host: The host's address.
        error: The error that has ended the connection, if any.

    Returns: The sentence, or an empty string if the host responds or the kernel does not report how long the host has
        been silent.
    """
    if not hasattr(socket, "TCP_INFO") or not hasattr(socket, "TCP_KEEPIDLE"):
        return ""
    try:
        silence_s = _tcp_info(peer, _LAST_ACK_AT) * 1e-3
        allowed_s = _MOST_MISSED * peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
    except OSError:
        # The connection is encrypted, and its relay has already closed the socket.
        return str(getattr(peer, "outage", ""))
    if silence_s < allowed_s and not isinstance(error, TimeoutError):
        return ""
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - silence_s))
    return f"host {host} not reachable since {since}, for {silence_s:.1f} s"


def round_trip_s(peer: socket.socket) -> float:
    """Return the round-trip time to a peer in seconds, measured when connecting; 0 if the kernel does not report it."""
    if not hasattr(socket, "TCP_INFO") or not hasattr(socket, "TCP_CONGESTION"):
        return 0.0
    return _tcp_info(peer, _ROUND_TRIP_AT) * 1e-6


def _tcp_info(peer: socket.socket, place: int) -> int:
    field = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, place + 4)
    return int(struct.unpack_from("=I", field, place)[0])


PORT_RANGE = "UNISONO_PORT_RANGE"
"""Variable with the ports on which ranks may listen, such as "20000-20099"."""


def port_range() -> range | None:
    """Return the ports on which ranks may listen; None for any.

    Raises:
        CommError: $UNISONO_PORT_RANGE is not a range of ports.

    Example:
        >>> port_range() is None
        True
    """
    text = os.environ.get(PORT_RANGE)
    if not text:
        return None
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < 1 << 16):
        raise CommError(f"{PORT_RANGE} is {text!r}, which is no range of ports, such as 20000-20099")
    return range(int(first), int(last) + 1)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on exactly this address, or, for a name of this host, on all of its addresses.

    For a name, it listens on all addresses, because hosts may resolve the name differently: a host often resolves its
    own name to a loopback address. For port 0, the socket listens on any port allowed for ranks.

    Raises:
        CommError: Listening on the address failed (the message gives the reason and the fix), or the allowed ports are
            invalid (see `port_range`).
    """
    ports = port_range() if port == 0 else None
    if ports is None:
        return _listen(host, port)
    # Ranks on one host start searching at different ports, so that they rarely compete for a port.
    start = os.getpid() % len(ports)
    for candidate in (*ports[start:], *ports[:start]):
        try:
            return _listen(host, candidate)
        except CommError as error:
            if getattr(error.__cause__, "errno", None) != errno.EADDRINUSE:
                raise
    raise CommError(f"cannot listen at {host}: all ports of {PORT_RANGE}={os.environ[PORT_RANGE]} are taken")


def _listen(host: str, port: int) -> socket.socket:
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        both = False
        if is_name(host):
            if not means_here(host):
                raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
            both = socket.has_dualstack_ipv6()
            family, address = (socket.AF_INET6, ("::", port)) if both else (socket.AF_INET, ("0.0.0.0", port))
        listener = socket.socket(family, kind, protocol)
        if both:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # Connections of a server that has just ended must not prevent the next server from using the same port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise CommError(f"cannot listen at {host}:{port}: {_reason(error, host, port)}") from error
    return listener


def _reason(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} is taken by another program; choose another port (in MASTER_PORT, or in "
            "tcp://host:port), the same on every rank, or end that program"
        )
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is not an address of this host; rank 0 must run on the host that the address names"
    if error.errno == errno.EACCES:
        return f"port {port} is reserved; choose one from 1024 to 65535"
    return f"{error.strerror or error}"


PROOF_BYTES = 32

_NAME = b"unisono"
_PROTOCOL = b"3"
"""Protocol number, changed whenever the bytes on any connection between ranks change."""
_WORD = _NAME + _PROTOCOL
_NONCE_BYTES = 32
HELLO_BYTES = len(_WORD) + _NONCE_BYTES

_RANK = struct.Struct("<q")
_NO_RANK = -1
_NO_PROOF = bytes(PROOF_BYTES)
RANK_BYTES = _RANK.size


class Hello:
    """One side of the proof that both peers know the secret.

    Args:
        secret: The secret that both sides should know.
        client: Whether this side is the client.
        rank: Rank of the client, if it has one.

    Attributes:
        hello: The bytes to send first.
        rank: The client's rank, proved or merely claimed; see `accepts`.
    """

    def __init__(self, secret: bytes, *, client: bool, rank: int | None = None) -> None:
        self._secret = secret
        self._client = client
        self.rank: int | None = rank
        self._nonce = os.urandom(_NONCE_BYTES)
        self._theirs = b""
        self.hello: bytes = _WORD + self._nonce

    def meet(self, hello: bytes) -> bool:
        """Record the peer's hello; return False if it belongs to another protocol."""
        self._theirs = hello[len(_WORD) :]
        return len(hello) == HELLO_BYTES and hello.startswith(_WORD)

    @staticmethod
    def versions(hello: bytes) -> str:
        """Return an error text if this package's hello has another protocol number; otherwise, an empty string."""
        number = hello[len(_NAME) : len(_WORD)]
        if not hello.startswith(_NAME) or number == _PROTOCOL or not number.isdigit():
            return ""
        return (
            f"speaks protocol {number.decode()} of unisono, and this rank protocol {_PROTOCOL.decode()}; install the "
            "same version of unisono for all ranks"
        )

    def proof(self) -> bytes:
        """Return the bytes that prove to the peer that this side knows the secret."""
        if not self._client:
            return self._derive(b"server")
        return self._derive(b"client", self._rank_bytes()) + self._rank_bytes()

    def claim(self) -> bytes:
        """Return this client's rank as bytes without a proof, to send if the server has a different secret."""
        return _NO_PROOF + self._rank_bytes()

    def accepts(self, proof: bytes) -> bool:
        """Return whether the peer knows the secret."""
        if self._client:
            return hmac.compare_digest(proof, self._derive(b"server"))
        proof, rank = proof[:PROOF_BYTES], proof[PROOF_BYTES:]
        accepted = hmac.compare_digest(proof, self._derive(b"client", rank))
        (number,) = _RANK.unpack(rank)
        if number >= 0 and (accepted or proof == _NO_PROOF):
            self.rank = number
        return accepted

    def channel(self) -> FrameChannel:
        """Return the channel for all data after the handshake."""
        keys = self._derive(b"client's frames"), self._derive(b"server's frames")
        return FrameChannel(*keys) if self._client else FrameChannel(*keys[::-1])

    def _rank_bytes(self) -> bytes:
        return _RANK.pack(_NO_RANK if self.rank is None else self.rank)

    def _derive(self, purpose: bytes, more: bytes = b"") -> bytes:
        nonces = (self._nonce, self._theirs) if self._client else (self._theirs, self._nonce)
        return hmac.digest(self._secret, b"unisono " + purpose + b"\0" + b"".join(nonces) + more, "sha256")


_VARIABLE = "UNISONO_SECRET"


def find_secret(given: str | bytes | None = None) -> bytes:
    """Return the given secret, else $UNISONO_SECRET, else this user's secret on this host.

    This user's secret is random, created on the first call, and kept in a file that only this user can read:
    `~/.config/unisono/secret` (or under $XDG_CONFIG_HOME), or in the directory for temporary files if there is no
    writable home.

    Raises:
        ValueError, TypeError: The given secret is empty, or neither text nor bytes.
        CommError: The secret's file or folder belongs to another user or is open to other users, the file is empty, or
            no folder can hold the file.

    Example:
        >>> find_secret("open sesame")
        b'open sesame'
    """
    chosen = os.environ.get(_VARIABLE) if given is None else given
    return _of_this_user() if chosen is None else secret_bytes(chosen)


def secret_bytes(given: str | bytes) -> bytes:
    """Return a secret from the caller or the environment, as bytes. Raises the same errors as `find_secret`."""
    # Reject numbers: `bytes(n)` would return n zeros.
    if not isinstance(given, str | bytes | bytearray | memoryview):
        raise TypeError(f"the secret must be text or bytes, not {type(given).__name__}")
    # Environment variables may contain arbitrary bytes.
    secret = given.encode(errors="surrogateescape") if isinstance(given, str) else bytes(given)
    if not secret:
        raise ValueError(f"the secret is empty; pass some random text (or leave {_VARIABLE} unset on a single host)")
    return secret


def _of_this_user() -> bytes:
    last: OSError | RuntimeError | None = None
    for directory in (_config_directory, _temporary_directory):
        try:
            return _read_or_create(directory())
        except CommError:
            raise
        # There is no home directory, or the secret cannot be written there: permission is missing, or the file system
        # is full, read-only or without hard links.
        except (OSError, RuntimeError) as error:
            last = error
    raise CommError(
        f"no folder can hold the secret ({last}); set {_VARIABLE} to the same random text for every rank"
    ) from last


def _config_directory() -> Path:
    configuration = os.environ.get("XDG_CONFIG_HOME")
    return (Path(configuration) if configuration else Path.home() / ".config") / "unisono"


def _temporary_directory() -> Path:
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"unisono-{user}"


def _read_or_create(directory: Path) -> bytes:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    refuse_if_shared(directory, os.stat(directory, follow_symlinks=False), stat.S_IWGRP | stat.S_IWOTH)
    path = directory / "secret"
    if not path.exists():
        # If another process creates the file first, use its secret.
        with contextlib.suppress(FileExistsError):
            write_aside(path, secrets.token_hex(32), os.link)
    with path.open("rb") as file:
        refuse_if_shared(path, os.fstat(file.fileno()), stat.S_IRWXG | stat.S_IRWXO)
        secret = file.read()
    if not secret:
        raise CommError(f"{path} is empty; remove it, and unisono creates a new secret")
    return secret


def refuse_if_shared(path: Path, status: os.stat_result, forbidden: int) -> None:
    """Raise `CommError` if another user owns the file, or if its mode has any of the `forbidden` bits."""
    if not hasattr(os, "geteuid"):
        return
    if status.st_uid != os.geteuid():
        raise CommError(f"{path} belongs to another user (number {status.st_uid}); remove it or choose another folder")
    if status.st_mode & forbidden:
        raise CommError(f"{path} is open to other users; run `chmod go-rwx {path}`, or remove it")
