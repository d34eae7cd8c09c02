"""Checks for bad input: the rank at fault raises a clear error before anything is sent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import torch

from unisono.collectives.algorithms import ALGORITHMS
from unisono.communicator import Communicator
from unisono.core.types import Recv
from unisono.testing.conformance.world import Raised, World, numbers, raised, together

__all__ = ["bad_arguments_are_rejected_before_sending", "second_thread_is_rejected"]


def bad_arguments_are_rejected_before_sending(world: World) -> None:
    """One rank makes an invalid call and gets a clear error; all ranks then continue unaffected."""
    found = world.run(_program, size=2)[0]
    for error, (mistake, kind, words, _) in zip(found, _BAD, strict=True):
        # A `MismatchError`, which is a `ValueError`, would come only after something was sent.
        assert error.kinds[:1] == (kind.__name__,), f"{mistake}: {error}, not {kind.__name__}"
        missing = [word for word in words if word not in error.text]
        assert not missing, f"{mistake}: {missing} is missing in: {error.text}"


def second_thread_is_rejected(world: World) -> None:
    """A communicator belongs to one thread until that thread calls `release_thread`."""

    def program(comm: Communicator) -> list[Raised]:
        together(comm)
        found: list[Raised] = []

        def other() -> None:
            found.append(raised(lambda: comm.all_reduce(numbers(comm, 1))))

        for released in (False, True):
            if released:
                comm.release_thread()
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        return found

    for found in world.run(program, on_failure="continue"):
        assert isinstance(found, list), found
        assert "CommError" in found[0].kinds, found
        assert "another thread" in found[0].text, found
        assert "release_thread" in found[0].text, found
        assert found[1] == Raised(), found


def _program(comm: Communicator) -> list[Raised]:
    together(comm)
    found = [raised(partial(call, comm)) for *_, call in _BAD] if comm.rank == 0 else []
    together(comm)
    return found


def _one(comm: Communicator) -> torch.Tensor:
    return numbers(comm, 1)


def _with_history(comm: Communicator) -> torch.Tensor:
    return numbers(comm, 1).requires_grad_() * 2


def _expanded(comm: Communicator) -> torch.Tensor:
    return numbers(comm, 1).expand(4)


def _overlapping(comm: Communicator) -> list[torch.Tensor]:
    whole = numbers(comm, 1, 2, 3)
    return [whole[:2], whole[1:]]


def _into_itself(comm: Communicator) -> None:
    tensor = _one(comm)
    comm.sendrecv(tensor, 1, tensor, 1)


def _pair(comm: Communicator) -> list[torch.Tensor]:
    return [_one(comm), _one(comm)]


_Bad = tuple[str, type[Exception], tuple[str, ...], Callable[[Communicator], object]]

_BAD: tuple[_Bad, ...] = (
    # -- ranks and tags
    ("send to a rank that is none", ValueError, ("dst=2", "0 to 1"), lambda c: c.send(_one(c), 2)),
    ("receive from rank -1", ValueError, ("src=-1", "0 to 1"), lambda c: c.irecv(_one(c), -1)),
    ("a rank of the wrong type", TypeError, ("dst", "str"), lambda c: c.send(_one(c), "1")),  # type: ignore[arg-type]
    ("a negative tag", ValueError, ("tag=-1",), lambda c: c.send(_one(c), 1, tag=-1)),
    ("a tag too large", ValueError, ("tag=16777216", "16777215"), lambda c: c.irecv(_one(c), 1, tag=2**24)),
    ("a wrong root", ValueError, ("src=2", "0 to 1"), lambda c: c.broadcast(_one(c), 2)),
    ("a wrong root", ValueError, ("dst=9", "0 to 1"), lambda c: c.reduce(_one(c), 9)),
    ("a wrong member", ValueError, ("ranks[1]=2",), lambda c: c.subgroup([0, 2])),
    ("a member twice", ValueError, ("[0, 0]",), lambda c: c.subgroup([0, 0])),
    ("a bad message in a batch", ValueError, ("src=7",), lambda c: c.batch_isend_irecv([Recv(_one(c), 7)])),
    # -- tensors
    ("no tensor", TypeError, ("torch.Tensor", "dict"), lambda c: c.all_reduce({"loss": 1.0})),  # type: ignore[call-overload]
    ("a device of another kind", ValueError, ("meta",), lambda c: c.all_reduce(torch.empty(2, device="meta"))),
    ("a sparse tensor", ValueError, ("to_dense",), lambda c: c.all_reduce(_one(c).to_sparse())),
    ("a gradient history", ValueError, ("detach", "no_grad"), lambda c: c.all_reduce(_with_history(c))),
    ("a gradient history, sent", ValueError, ("detach", "no_grad"), lambda c: c.send(_with_history(c), 1)),
    ("elements that share memory", ValueError, ("share memory",), lambda c: c.all_reduce(_expanded(c))),
    ("elements that share memory, received", ValueError, ("share memory",), lambda c: c.recv(_expanded(c), 1)),
    (
        "outputs that overlap",
        ValueError,
        ("share memory", "tensor_list[0]", "tensor_list[1]"),
        lambda c: c.all_gather(_overlapping(c), numbers(c, 1, 2)),
    ),
    (
        "an output that is an input",
        ValueError,
        ("share memory",),
        lambda c: c.all_to_all(*[_pair(c)] * 2),
    ),
    (
        "received into what is sent",
        ValueError,
        ("share memory",),
        _into_itself,
    ),
    # -- lists and lengths
    ("a list too short", ValueError, ("each of the 2 ranks", "not 1"), lambda c: c.all_gather([_one(c)], _one(c))),
    ("no list", TypeError, ("list of tensors",), lambda c: c.reduce_scatter(_one(c), _one(c))),  # type: ignore[call-overload]
    ("no list at the root", ValueError, ("scatter_list", "rank 0"), lambda c: c.scatter(_one(c), None, 0)),
    ("a list away from the root", ValueError, ("rank 1", "None"), lambda c: c.gather(_one(c), _pair(c), 1)),
    (
        "an entry of another length",
        ValueError,
        ("scatter_list[1]", "2 elements"),
        lambda c: c.scatter(_one(c), [_one(c), numbers(c, 1, 2)], 0),
    ),
    (
        "an entry of another dtype",
        ValueError,
        ("gather_list[1]", "int32"),
        lambda c: c.gather(_one(c), [_one(c), numbers(c, 1, dtype=torch.int32)], 0),
    ),
    (
        "an output too short",
        ValueError,
        ("2 times the 3 elements", "not 5"),
        lambda c: c.all_gather_single(torch.zeros(5, device=c.device), numbers(c, 1, 2, 3)),
    ),
    (
        "an input too short",
        ValueError,
        ("2 times the 3 elements", "not 5"),
        lambda c: c.reduce_scatter_single(numbers(c, 1, 2, 3), torch.zeros(5, device=c.device)),
    ),
    (
        "splits that do not add up",
        ValueError,
        ("[1, 1]", "3 rows"),
        lambda c: c.all_to_all_single(numbers(c, 1, 2, 3), numbers(c, 1, 2, 3), [1, 1], [1, 2]),
    ),
    (
        "rows that ranks do not divide",
        ValueError,
        ("3 rows", "split sizes"),
        lambda c: c.all_to_all_single(numbers(c, 1, 2, 3), numbers(c, 1, 2, 3)),
    ),
    # -- operations and algorithms
    ("an unknown op", ValueError, ("'mean'", "sum", "bxor"), lambda c: c.all_reduce(_one(c), "mean")),
    (
        "the average of integers",
        ValueError,
        ("avg", "int64"),
        lambda c: c.all_reduce(numbers(c, 1, dtype=torch.int64), "avg"),
    ),
    ("bits of floats", ValueError, ("band", "float32"), lambda c: c.reduce(_one(c), 0, "band")),
    (
        "the maximum of complex numbers",
        ValueError,
        ("max", "complex64"),
        lambda c: c.reduce_scatter(_one(c).to(torch.complex64), [_one(c).to(torch.complex64)] * 2, "max"),
    ),
    *(
        ("an unknown algorithm", ValueError, ("'rang'", ALGORITHMS[name].names()[0]), call)
        for name, call in {
            "all_reduce": lambda c: c.all_reduce(_one(c), algorithm="rang"),
            "broadcast": lambda c: c.broadcast(_one(c), 0, algorithm="rang"),
            "barrier": lambda c: c.barrier(algorithm="rang"),
        }.items()
    ),
)
