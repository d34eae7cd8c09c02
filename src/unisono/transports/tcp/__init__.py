"""Transport between processes on any hosts, over dedicated connections."""

from __future__ import annotations

from unisono.transports.tcp.transport import TRANSPORT, TcpTransport

__all__ = ["TRANSPORT", "TcpTransport"]
