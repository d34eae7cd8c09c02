"""Point-to-point: a dict from rank 0 to rank 1, as its length and its bytes.

mpirun -n 4 python docs/examples/mpi4py/objects.py
"""

from __future__ import annotations

import unisono as un
from unisono.serialization import decode, encode


def send_object(comm: un.Communicator, obj: object, dst: int, tag: int = 0) -> None:
    data = encode(obj)
    comm.send([len(data)], dst, tag)
    comm.send(data, dst, tag)


def recv_object(comm: un.Communicator, src: int, tag: int = 0) -> object:
    length = [0]
    comm.recv(length, src, tag)
    data = bytearray(length[0])
    comm.recv(data, src, tag)
    return decode(data)


def run(comm: un.Communicator) -> str:
    """Return what this rank has received."""
    data: object = None
    if comm.rank == 0:
        send_object(comm, {"a": 7, "b": 3.14}, dst=1, tag=11)
    elif comm.rank == 1:
        data = recv_object(comm, src=0, tag=11)
    return f"rank {comm.rank}: {data}"


if __name__ == "__main__":
    with un.init() as comm:
        print(run(comm))
