"""Buffers instead of tensors: kinds, dtypes and layouts, results in place, refusals, asynchronous calls."""

from __future__ import annotations

import array
import ctypes
import gc
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import unisono as un
from unisono.core.tensors import as_tensor
from unisono.testing import pool

DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "longlong", "ulonglong"]
TYPECODES = "bBhHiIlLqQfd"


class Exported:
    """An array of another library: all that is known of it is DLPack."""

    def __init__(self, array: np.ndarray[Any, Any], versioned: bool = True) -> None:
        self.array, self.versioned = array, versioned

    def __dlpack__(self, **options: Any) -> Any:
        if not self.versioned and "max_version" in options:
            raise TypeError("max_version")
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class Described:
    """An object with NumPy's array interface."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        self.__array_interface__ = array.__array_interface__


def strided(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the values at every second place of a larger array."""
    whole = np.zeros((*values.shape, 2), values.dtype)
    whole[..., 0] = values
    return whole[..., 0]


def through_memory(values: np.ndarray[Any, Any]) -> memoryview:
    return memoryview(np.ascontiguousarray(values))


KINDS: dict[str, Callable[[np.ndarray[Any, Any]], Any]] = {
    "tensor": lambda values: torch.from_numpy(values.astype(values.dtype.str)),
    "array": np.array,
    "array of Fortran": lambda values: np.asfortranarray(values).copy("K"),
    "array with strides": strided,
    "transposed": lambda values: np.ascontiguousarray(values.T).T,
    "DLPack": lambda values: Exported(values.copy()),
    "older DLPack": lambda values: Exported(values.copy(), versioned=False),
    "array interface": lambda values: Described(values.copy()),
    "memoryview": lambda values: through_memory(values.copy()),
    "list": lambda values: values.reshape(-1).tolist(),
}
READ = {
    "reversed": lambda values: values[::-1].copy()[::-1],
    "read-only": lambda values: frozen(values.copy()),
    "tuple": lambda values: tuple(values.reshape(-1).tolist()),
    "bytes": lambda values: memoryview(values.tobytes()).cast("B"),
}

OLD_DLPACK = torch.__version__ < (2, 9)
"""Torch 2.8 asks for the first version of DLPack, in which read-only memory cannot be exported."""
if not OLD_DLPACK:
    READ["read-only DLPack"] = lambda values: Exported(frozen(values.copy()))


def frozen(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    values.flags.writeable = False
    return values


def content(buffer: Any) -> list[Any]:
    """Return the elements of a buffer in order."""
    if isinstance(buffer, Exported | Described):
        buffer = buffer.array
    flat = torch.as_tensor(buffer) if isinstance(buffer, list | torch.Tensor) else np.asarray(buffer)
    return flat.reshape(-1).tolist()


@st.composite
def values(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(st.sampled_from([(), (0,), (1,), (5,), (2, 3), (2, 0, 3), (3, 1, 2)]))
    count = int(np.prod(shape))
    return np.asarray(draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))).astype(dtype).reshape(shape)


def fits(kind: str, found: np.ndarray[Any, Any]) -> bool:
    """Return whether a kind of buffer can hold these values with their dtype and shape."""
    if kind in ("list", "tuple"):
        return found.size > 0 and found.dtype in (np.bool_, np.int64, np.float64, np.complex128)
    return (kind != "bytes" or found.dtype == np.uint8) and (kind != "reversed" or found.ndim > 0)


def calls(comm: un.Communicator, make: Callable[[], Any], like: np.ndarray[Any, Any], later: bool) -> list[Any]:
    """Return what buffers hold after calls that write these; every rank but 0 begins with zeros."""
    zeros = np.zeros_like(like)
    mine = make() if comm.rank == 0 else zeros.copy()
    work = comm.broadcast(mine, 0, async_op=True) if later else comm.broadcast(mine, 0)
    assert work is None or work.wait() is None
    table = [zeros.copy() for _ in range(comm.size)]
    comm.all_gather(table, mine)
    if comm.rank == 0:
        comm.isend(mine, 1).wait()
        received = make()
    else:
        received = zeros.copy()
        works = comm.batch_isend_irecv([un.Recv(received, 0)]) if later else [comm.irecv(received, 0)]
        works[0].wait()
    return [content(mine), *map(content, table), content(received)]


@given(found=values(), kind=st.sampled_from([*KINDS, *READ]), later=st.booleans())
def test_buffers_are_read_as_the_tensors_they_stand_for(found: Any, kind: str, later: bool) -> None:
    if fits(kind, found):
        make = (KINDS | READ)[kind]
        expected = found.reshape(-1).tolist()
        for held in pool("thread", 2).run(calls, lambda: make(found), found, later):
            assert held == [expected] * 4


def written(comm: un.Communicator, kind: str, found: np.ndarray[Any, Any], later: bool) -> list[Any]:
    """Return the elements of a buffer of this kind after each call that writes it."""
    held = []

    def check(buffer: Any, call: Callable[..., Any], *arguments: Any) -> None:
        work = call(*arguments, **({"async_op": True} if later else {}))
        assert work is None or work.wait() is None
        held.append(content(buffer))

    make = KINDS[kind]
    if found.dtype.kind != "c" and found.dtype.str[1:] not in ("u2", "u4", "u8"):
        buffer = make(found)
        check(buffer, comm.all_reduce, buffer, "max")
    buffer = make(np.zeros_like(found)) if comm.rank else found
    check(buffer, comm.broadcast, buffer, 0)
    buffers = [make(np.zeros_like(found)) for _ in range(comm.size)]
    check(buffers[1], comm.all_to_all, buffers, [found] * comm.size)
    buffer = make(np.zeros_like(found))
    comm.sendrecv(found, 1 - comm.rank, buffer, 1 - comm.rank)
    return [*held, content(buffer)]


@given(found=values(), kind=st.sampled_from([*KINDS]), later=st.booleans())
def test_results_are_written_to_the_object_that_was_passed(found: Any, kind: str, later: bool) -> None:
    if fits(kind, found):
        for held in pool("thread", 2).run(written, kind, found, later):
            assert held == [found.reshape(-1).tolist()] * len(held)


@pytest.mark.parametrize("code", TYPECODES)
def test_arrays_of_every_typecode_share_their_memory(code: str) -> None:
    buffer = array.array(code, [1, 2, 3])
    tensor = as_tensor(buffer, "the tensor", written=True)
    tensor[1] = 5
    assert tensor.tolist() == buffer.tolist() == [1, 5, 3]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("tensor", "list")])
def test_no_writable_memory_is_copied(kind: str) -> None:
    buffer = KINDS[kind](np.arange(6, dtype=np.int32).reshape(2, 3))
    as_tensor(buffer, "the tensor", written=True).add_(1)
    assert content(buffer) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("buffer", "told"),
    [
        (np.zeros(2, [("a", "i4"), ("b", "f4")]), r"dtype \[\('a', '<i4'\), \('b', '<f4'\)\], which torch does not"),
        (np.zeros(2, "M8[s]"), r"dtype datetime64\[s\]"),
        (np.zeros(2, ">i4"), r"dtype >i4 of foreign byte order"),
        (np.zeros(2, np.longdouble), "dtype (float128|longdouble)"),
        (np.array([None]), "dtype object"),
        (np.array(["a"]), "dtype <U1"),
        (np.longdouble(1), "dtype (float128|longdouble)"),
        (np.ma.array([1.0], mask=[True]), "masked array"),
        (memoryview(bytearray(4))[::2], "not contiguous"),
        (memoryview((ctypes.c_int32.__ctype_be__ * 2)()), "'>i'"),
        (Exported(np.arange(3)[::-1]), "negative stride"),
        (Exported(np.zeros(2, ">i4")), "native byte order"),
        ([1, 2.0], "mixes numbers of float64 and int64"),
        ([2**63], "outside the range of int64"),
        ([[1]], "list of list"),
        ("text", "numbers, not str"),
        ({}, "numbers, not dict"),
    ],
)
def test_what_has_no_tensor_is_one_error(buffer: Any, told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        as_tensor(buffer, "the tensor", written=False)


@pytest.mark.parametrize(
    ("buffer", "told"),
    [
        (3.0, "single number, which cannot be written; pass a list or an array of one"),
        (np.float32(3), "single number"),
        ((3.0,), "a tuple"),
        (b"abc", "is read-only"),
        (frozen(np.zeros(3)), "is read-only"),
        *([] if OLD_DLPACK else [(Exported(frozen(np.zeros(3))), "is read-only")]),
        (np.zeros(3)[::-1], r"strides \(-8,\)"),
        (np.zeros(3, [("a", "i1"), ("b", "f8")])["b"], r"strides \(9,\)"),
        (np.lib.stride_tricks.as_strided(np.zeros(1), (3,), (0,)), "share memory"),
    ],
)
def test_what_cannot_be_written_is_one_error_before_anything_moves(buffer: Any, told: str) -> None:
    def program(comm: un.Communicator) -> float:
        for call in (comm.all_reduce, comm.recv, comm.irecv):
            with pytest.raises((TypeError, ValueError), match=told):
                call(buffer)
        with pytest.raises((TypeError, ValueError), match=rf"tensor_list\[1\].*{told}"):
            comm.all_gather([as_tensor(buffer, "", written=False).clone(), buffer], buffer)
        total = [1.0]
        comm.all_reduce(total)
        return total[0]

    assert pool("thread", 2).run(program) == [2.0, 2.0]


def test_lists_of_results() -> None:
    def program(comm: un.Communicator) -> list[Any]:
        with pytest.raises(ValueError, match="tensor_list has one list several times"):
            comm.all_gather([[0]] * comm.size, comm.rank)
        with pytest.raises(TypeError, match="must be a list of tensors, not bytearray"):
            comm.all_gather(bytearray(2), 1)
        ranks, parts = [0] * comm.size, [[0.0] for _ in range(comm.size)]
        comm.all_gather_single(ranks, comm.rank)
        comm.gather(comm.rank / 2, parts if comm.rank == 1 else None, 1)
        mine = [0]
        comm.scatter(mine, [7, 8] if comm.rank == 0 else [])
        if comm.rank == 1:
            with pytest.raises(ValueError, match="for rank 0 only"):
                comm.scatter(mine, np.zeros(2))  # type: ignore[call-overload]  # on purpose
        rows = comm.all_gather_v(np.full((comm.rank, 2), 3.0))
        return [ranks, parts, mine, [row.tolist() for row in rows]]

    for rank, found in enumerate(pool("thread", 2).run(program)):
        assert found == [[0, 1], [[0.0], [0.5 * rank]], [7 + rank], [[], [[3.0, 3.0]]]]


def test_the_list_at_the_root_of_a_broadcast_stays() -> None:
    def program(comm: un.Communicator) -> Any:
        given = (1, 2) if comm.rank == 0 else [0, 0]
        comm.broadcast(given, 0)
        return given

    assert pool("thread", 2).run(program) == [(1, 2), [1, 2]]


def test_asynchronous_calls_keep_buffers_alive() -> None:
    def program(comm: un.Communicator) -> Any:
        if comm.rank == 0:
            works = [comm.isend(np.full(10_000, 7.0), 1), comm.isend([1.5] * 10, 1, tag=1)]
            gc.collect()
            return [work.wait() for work in works] and None
        junk = [np.zeros(10_000) for _ in range(10)]
        memory, numbers = bytearray(80_000), [0.0] * 10
        works = [comm.irecv(memoryview(memory).cast("d"), 0), comm.irecv(numbers, 0, tag=1)]
        with pytest.raises(BufferError):
            memory.append(0)
        for work in works:
            work.wait()
        del work, works
        memory.append(0)
        return len(junk), set(memoryview(memory)[:-1].cast("d")), numbers

    assert pool("thread", 2).run(program)[1] == (10, {7.0}, [1.5] * 10)


def test_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    for buffer in (2.0, [2.0], array.array("d", [2.0]), memoryview(b"\x02"), Exported(np.array(2.0))):
        assert as_tensor(buffer, "the tensor", written=False).sum() == 2
    with pytest.raises(TypeError, match="list of float32"):
        as_tensor([np.float32(1)], "the tensor", written=False)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_processes(backend: str) -> None:
    def program(comm: un.Communicator) -> list[Any]:
        array, numbers, memory = np.arange(3.0) + comm.rank, [comm.rank, 1], bytearray([comm.rank])
        comm.all_reduce(array)
        work = comm.all_reduce(numbers, async_op=True)
        work.wait()
        comm.broadcast(memory, 1)
        table = np.zeros((2, 3))
        comm.all_gather(list(table), array)
        return [array.tolist(), numbers, memory, table.tolist()]

    summed = [1.0, 3.0, 5.0]
    assert pool(backend, 2).run(program) == [[summed, [1, 2], bytearray([1]), [summed, summed]]] * 2
