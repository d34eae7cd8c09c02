"""Transport between processes of any hosts, over connections of its own."""

from __future__ import annotations

from unisono.transports.tcp.transport import TRANSPORT, TcpTransport

__all__ = ["TRANSPORT", "TcpTransport"]
