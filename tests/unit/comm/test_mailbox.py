"""Messages of a mailbox over a transport that has none of its own."""

from __future__ import annotations

import torch

import unisono as un
from unisono.testing import pool

WITHIN_S = 30.0


def test_long_heads_and_many_bodies_arrive_in_order() -> None:
    """A message that does not fit into one envelope may have its head, or the lengths of its bodies, in the rest."""
    heads = [b"short", b"h" * 5000, b"", b"last"]
    lengths = [[3, 0, 5], [7], [0, 1] * 300, []]

    def program(comm: un.Communicator) -> list[tuple[bytes, list[list[int]]]]:
        box, _ = comm.mailbox()
        found: list[tuple[bytes, list[list[int]]]] = []
        for head, sizes in zip(heads, lengths, strict=True):
            if comm.rank == 0:
                box.send(1, head, [torch.full((size,), size, dtype=torch.uint8) for size in sizes], WITHIN_S)
        while comm.rank == 1 and len(found) < len(heads):
            box.wait(WITHIN_S)
            found += [(mail.head, [body.tolist() for body in mail.bodies]) for mail in box.poll()]
        comm.barrier()
        box.close()
        return found

    expected = [(head, [[size] * size for size in sizes]) for head, sizes in zip(heads, lengths, strict=True)]
    assert pool("thread").run(program, size=2)[1] == expected
