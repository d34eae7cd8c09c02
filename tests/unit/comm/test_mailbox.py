"""Messages of a mailbox over a transport that has none of its own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import unisono as un
from unisono.core.group import Group
from unisono.core.transport import Envelope, Mailbox
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


class Breaks(Mailbox):
    """A mailbox whose resources cannot be released, and that nobody sends to."""

    def send(self, peer: int, head: bytes, bodies: Sequence[torch.Tensor], timeout: float) -> None:
        raise NotImplementedError

    def poll(self) -> list[Envelope]:
        return []

    def wait(self, timeout: float) -> None:
        pass

    def wake(self) -> None:
        pass

    def release(self) -> None:
        assert self.closed
        raise OSError("it cannot be released")


def test_a_mailbox_closes_once_even_if_its_release_fails() -> None:
    box = Breaks(Group.world(0, 2))
    closed = []
    box.on_close = lambda: closed.append(box.closed)
    with pytest.raises(OSError, match="cannot be released"):
        box.close()
    assert closed == [True]
    # Neither is called again.
    box.close()
    assert closed == [True]
