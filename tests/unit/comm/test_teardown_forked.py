"""A forked child is no rank: its use of an inherited communicator affects no other process."""

from __future__ import annotations

import os

import pytest
import torch

import unisono as un
from unisono.testing import pool


def child(comm: un.Communicator, part: un.Communicator, answer: int) -> None:
    """Try to send, to reduce, and to leave; then to use a subgroup."""
    said = []
    for attempt in (lambda: comm.send(torch.zeros(4), 1, timeout=5.0), lambda: comm.all_reduce(torch.zeros(4))):
        try:
            attempt()
            said.append("done")
        except un.errors.CommError as error:
            said.append("a fork" if "is a fork" in str(error) else str(error))
    comm.close()
    try:
        part.barrier()
    except un.errors.ClosedError:
        said.append("closed")
    os.write(answer, ", ".join(said).encode())


def program(comm: un.Communicator) -> tuple[str, list[float]]:
    said, tensor, first = "", torch.full((2,), comm.rank + 1.0), torch.ones(1)
    part = comm.dup()
    part.all_reduce(first)
    inner = part.dup()
    if comm.rank == 0:
        reader, writer = os.pipe()
        process = os.fork()
        if process == 0:
            try:
                child(part, inner, writer)
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as answer:
            said = answer.read()
        os.waitpid(process, 0)
        part.send(tensor, 1)
    else:
        part.recv(tensor, 0)
    part.all_reduce(tensor)
    inner.all_reduce(tensor)
    part.close()
    return said, tensor.tolist()


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_forked_child_is_excluded_without_effect(backend: str) -> None:
    assert pool(backend, 2).run(program) == [("a fork, a fork, closed", [4.0, 4.0]), ("", [4.0, 4.0])]
