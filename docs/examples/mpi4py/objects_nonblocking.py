"""Point-to-point without blocking: a dict from rank 0 to rank 1, as its length and its bytes.

mpirun -n 4 python docs/examples/mpi4py/objects_nonblocking.py
"""

from __future__ import annotations

import unisono as un
from unisono.serialization import decode, encode


def run(comm: un.Communicator) -> str:
    """Return what this rank has received."""
    data: object = None
    if comm.rank == 0:
        content = encode({"a": 7, "b": 3.14})
        for work in [comm.isend([len(content)], dst=1, tag=11), comm.isend(content, dst=1, tag=11)]:
            work.wait()
    elif comm.rank == 1:
        length = [0]
        comm.irecv(length, src=0, tag=11).wait()
        received = bytearray(length[0])
        comm.irecv(received, src=0, tag=11).wait()
        data = decode(received)
    return f"rank {comm.rank}: {data}"


if __name__ == "__main__":
    with un.init() as comm:
        print(run(comm))
