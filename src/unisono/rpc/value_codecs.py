"""Codecs used only by calls: tensors sent separately, tensors with history, references, functions, pickles.

a  a tensor with its bytes sent as a separate body
o  an order of dimensions, and a tensor with its elements stored in that order
g  a tensor with a history, which follows
z  a sparse tensor: whether it is coalesced, its shape, indices and values
r  a reference
q  a function or class, by name
k  any object, pickled, between ranks that trust each other
"""

from __future__ import annotations

import io
import pickle
import types
from typing import Any

import torch

from unisono.rpc.exported import NotExposedError, name_of
from unisono.rpc.message import MessageReader, MessageWriter
from unisono.rpc.protocol import NO_CONTEXT
from unisono.serialization import tensors
from unisono.serialization.builtins import put_items, take_items
from unisono.serialization.format import (
    Encoder,
    Parts,
    UnsendableError,
    View,
    decoders,
    encoders,
    finders,
    head,
    put_text,
    read,
    take_bytes,
    take_text,
    write,
)
from unisono.serialization.functions import FunctionPickler

__all__ = ["install", "put_pickled", "register_reference"]

_INLINE_BYTES = 8192
"""A tensor up to this long is copied among the other values; a longer one is sent as a separate body."""
_MOST_BODIES = 200

_ASIDE, _ORDERED, _REFERENCE, _FUNCTION, _PICKLED, _RECORDED, _SPARSE = (ord(kind) for kind in "aorqkgz")
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, type)


# -- tensors ---------------------------------------------------------------------------------------
def _find(cls: type[Any]) -> Encoder | None:
    """Find encoders of types that only calls support; other messages encode tensors as usual."""
    if issubclass(cls, torch.Tensor):
        return _put_tensor
    if issubclass(cls, _FUNCTIONS):
        return _put_function
    return None


def _put_tensor(parts: Parts, tensor: torch.Tensor, depth: int) -> None:
    if not isinstance(parts, MessageWriter):
        encoder = tensors.find(type(tensor))
        assert encoder is not None
        return encoder(parts, tensor, depth)
    if parts.context != NO_CONTEXT and tensor.requires_grad and torch.is_grad_enabled():
        tensor = tensor.cpu()
        parts.append(b"g")
        parts.recorded.append(tensor)
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.detach()
        parts.append(b"z" + head("t", 4)[1:])
        content = [tensor.is_coalesced(), list(tensor.shape), tensor._indices(), tensor._values()]
        return put_items(parts, content, depth)
    order = _order(tensor)
    if order is not None:
        parts.append(b"o" + head("t", len(order))[1:])
        put_items(parts, order, depth)
        tensor = tensor.detach().permute(order)
    if not _plain(tensor) or tensor.nbytes <= _INLINE_BYTES or len(parts.bodies) >= _MOST_BODIES:
        encoder = tensors.find(torch.Tensor)
        assert encoder is not None
        return encoder(parts, tensor, depth)
    dense = tensor.detach()
    if not (dense.is_contiguous() and dense.is_cpu) or dense.is_conj() or dense.is_neg():
        dense = dense.resolve_conj().resolve_neg().cpu().contiguous()
    parts.append(b"a")
    put_text(parts, str(dense.dtype).removeprefix("torch."))
    parts.append(head("t", dense.dim())[1:])
    put_items(parts, dense.shape, depth)
    parts.bodies.append(dense.reshape(-1).view(torch.uint8))


def _plain(tensor: torch.Tensor) -> bool:
    dense = tensor.layout == torch.strided and not tensor.is_quantized
    return dense and not tensors.has_no_storage(tensor) and tensor.device.type != "meta"


def _order(tensor: torch.Tensor) -> list[int] | None:
    """Return the dimensions by falling strides, if storage in that order is dense and not the default order."""
    if not _plain(tensor) or tensor.is_contiguous():
        return None
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return order if tensor.detach().permute(order).is_contiguous() else None


def _take_ordered(view: View, at: int, depth: int) -> tuple[torch.Tensor, int]:
    order, at = take_items(view, at, depth)
    tensor, at = read(view, at, depth - 1)
    if not isinstance(tensor, torch.Tensor) or sorted(order) != list(range(tensor.dim())):
        raise ValueError("a dimension order was sent without its tensor")
    return tensor.permute([order.index(dimension) for dimension in range(len(order))]), at


def _take_sparse(view: View, at: int, depth: int) -> tuple[torch.Tensor, int]:
    (coalesced, shape, indices, values), at = take_items(view, at, depth)
    if not coalesced:
        return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True), at
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True, is_coalesced=True), at


def _take_aside(view: View, at: int, depth: int) -> tuple[torch.Tensor, int]:
    name, at = take_text(view, at + 1)
    dtype = vars(torch).get(name)
    shape, at = take_items(view, at, depth)
    if not isinstance(dtype, torch.dtype) or not isinstance(view, MessageReader):
        raise ValueError(f"a tensor of {name!r} was sent")
    body = view.bodies[view.tensors]
    view.tensors += 1
    # Operations would disagree about a bool that is neither 0 nor 1.
    return (body.ne(0) if dtype == torch.bool else body.view(dtype)).reshape(shape), at


def _take_recorded(view: View, at: int, depth: int) -> tuple[torch.Tensor, int]:
    tensor, at = read(view, at, depth)
    if not isinstance(view, MessageReader) or not isinstance(tensor, torch.Tensor):
        raise ValueError("a recorded value is not a tensor")
    return view.endpoint.recorder.receive(view.context, view.peer, view.message, tensor), at


# -- functions and classes -------------------------------------------------------------------------
def _put_function(parts: Parts, target: Any, depth: int) -> None:
    if not isinstance(parts, MessageWriter):
        raise UnsendableError(f"the {type(target).__name__} {getattr(target, '__qualname__', target)}")
    try:
        name = name_of(target)
    except TypeError:
        name = ""
    if parts.endpoint.exposed.trusted and not parts.endpoint.exposed.finds(name, target):
        return put_pickled(parts, target, depth)
    if not name:
        raise UnsendableError(f"{target!r}, which has no name by which another rank could find it")
    parts.append(b"q")
    put_text(parts, name)


def _take_function(view: View, at: int, _depth: int) -> tuple[Any, int]:
    name, at = take_text(view, at + 1)
    if not isinstance(view, MessageReader):
        raise ValueError(f"the function {name} was sent")
    try:
        return view.endpoint.exposed.function(name), at
    except NotExposedError:
        view.refused = NotExposedError(
            f"rank {view.peer} sent {name.replace(':', '.')} as a value, which is not exposed on rank "
            f"{view.endpoint.rank}: put @unisono.rpc.expose above it in the code of every rank, name it in "
            "rpc.init(..., expose=[...]), or pass trusted=True to rpc.init on the rank that receives it"
        )
        return None, at


# -- references ------------------------------------------------------------------------------------
def register_reference(cls: type[Any]) -> None:
    """Set the class of references."""

    def put_reference(parts: Parts, reference: Any, depth: int) -> None:
        if not isinstance(parts, MessageWriter):
            raise UnsendableError("an RRef, which only calls carry")
        parts.append(b"r")
        put_items(parts, parts.endpoint.references.pass_on(reference, parts), depth)

    encoders[cls] = put_reference


def _take_reference(view: View, at: int, depth: int) -> tuple[Any, int]:
    words = []
    for _ in range(4):
        word, at = read(view, at, depth)
        words.append(word)
    if not isinstance(view, MessageReader) or not all(type(word) is int for word in words):
        raise ValueError("a malformed reference")
    return view.endpoint.references.accept(view.peer, *words), at


# -- any object, among ranks that trust each other -------------------------------------------------
class _Pickler(FunctionPickler):
    """Pickler that encodes references, and tensors that calls support, as in any other call."""

    def __init__(self, file: io.BytesIO, parts: MessageWriter) -> None:
        super().__init__(file)
        self._parts = parts
        self.values: list[object] = []

    def persistent_id(self, value: object) -> int | None:
        apart = type(value) is torch.Tensor and (_plain(value) or value.layout == torch.sparse_coo)
        if apart or hasattr(type(value), "__unisono_reference__"):
            self.values.append(value)
            return len(self.values) - 1
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, values: list[object]) -> None:
        super().__init__(io.BytesIO(content))
        self._values = values

    def persistent_load(self, number: int) -> object:
        return self._values[number]


def put_pickled(parts: Parts, value: Any, depth: int) -> None:
    """Append a value of any type."""
    assert isinstance(parts, MessageWriter)
    file = io.BytesIO()
    pickler = _Pickler(file, parts)
    try:
        pickler.dump(value)
    except Exception as error:
        raise UnsendableError(f"a {type(value).__qualname__}, which cannot be pickled ({error})") from error
    content = file.getvalue()
    parts.append(b"k")
    write(parts, pickler.values, depth - 1)
    parts.append(head("b", len(content))[1:])
    parts.append(content)


def _take_pickled(view: View, at: int, depth: int) -> tuple[Any, int]:
    if not isinstance(view, MessageReader) or not view.endpoint.exposed.trusted:
        raise ValueError(
            "a pickled value was sent, which is accepted only after rpc.init(..., trusted=True) on this rank"
        )
    values, at = read(view, at, depth - 1)
    content, at = take_bytes(view, at)
    return _Unpickler(bytes(content), values).load(), at


def install() -> None:
    """Register the codecs of calls with the serialization. Idempotent."""
    if _find not in finders:
        finders.insert(0, _find)
        kinds = {
            _ASIDE: _take_aside,
            _ORDERED: _take_ordered,
            _REFERENCE: _take_reference,
            _FUNCTION: _take_function,
            _PICKLED: _take_pickled,
            _RECORDED: _take_recorded,
            _SPARSE: _take_sparse,
        }
        for kind, decoder in kinds.items():
            decoders[kind] = decoder
