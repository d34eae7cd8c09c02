"""Transport between processes on one host, over shared memory."""

from __future__ import annotations

from unisono.transports.shm.transport import TRANSPORT, ShmTransport

__all__ = ["TRANSPORT", "ShmTransport"]
