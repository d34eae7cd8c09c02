"""Transport between processes on any hosts, over dedicated connections."""

from unisono.transports.tcp.transport import TRANSPORT, TcpTransport

__all__ = ["TRANSPORT", "TcpTransport"]
