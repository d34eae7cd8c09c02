"""Transport over MPI, through mpi4py."""

from unisono.transports.mpi.transport import TRANSPORT, MpiTransport

__all__ = ["TRANSPORT", "MpiTransport"]
