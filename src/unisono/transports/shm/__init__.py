"""Transport between processes on one host, over shared memory."""

from unisono.transports.shm.transport import TRANSPORT, ShmTransport

__all__ = ["TRANSPORT", "ShmTransport"]
