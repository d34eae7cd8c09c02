"""Writer of one safetensors file, with digests computed from the very bytes that are written."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unisono.checkpoint.errors import CheckpointError
from unisono.checkpoint.manifest import CHUNK, FileEntry, FilePiece, blocks, digest, hasher
from unisono.checkpoint.storage import Sink
from unisono.checkpoint.tree import memory_of, safetensors_form

__all__ = ["ByteCallback", "Shard", "write_file"]

ByteCallback = Callable[[int], None]
"""Called with how many more bytes are done."""

_ALIGNED = 64


@dataclass(frozen=True)
class Shard:
    """A tensor, or a slice of a tensor, to write to a file.

    Attributes:
        name: The tensor's.
        dtype, shape: The tensor's.
        start, stop: Range of its bytes.
        data: These bytes, as uint8 values on the CPU.
        digests: Digests of its blocks, if known; writing must reproduce them.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int
    data: torch.Tensor
    digests: tuple[str, ...] | None = None


def write_file(
    sink: Sink, name: str, save_id: str, portions: Sequence[Shard], on_bytes: ByteCallback
) -> tuple[FileEntry, list[FilePiece]]:
    """Write the portions in order, and finish the file.

    Raises:
        CheckpointError: A tensor was changed meanwhile.
        OSError: The storage refused.
    """
    header = _header(save_id, portions)
    file_hash = hasher()
    file_hash.update(header)
    sink.write(memoryview(header))
    position = len(header)
    pieces = []
    for portion in portions:
        memory = memory_of(portion.data)
        found = []
        for low, high in blocks(0, len(memory)):
            found.append(_write_block(sink, memory[low:high], file_hash, on_bytes))
        if portion.digests is not None and tuple(found) != portion.digests:
            raise CheckpointError(
                "it was changed while it was being saved; wait for the save, or use async_save, which copies first: "
                f"{portion.name!r}",
                tensors=[portion.name],
            )
        pieces.append(FilePiece(0, position, position + len(memory), tuple(found)))
        position += len(memory)
    sink.finish()
    return FileEntry(name, position, len(header), digest(header), str(file_hash.hexdigest())), pieces


def _write_block(sink: Sink, memory: memoryview, file_hash: Any, on_bytes: ByteCallback) -> str:
    block = hasher()
    for low in range(0, len(memory), CHUNK):
        chunk = memory[low : low + CHUNK]
        block.update(chunk)
        file_hash.update(chunk)
    sink.write(memory)
    on_bytes(len(memory))
    return str(block.hexdigest())


def _header(save_id: str, portions: Sequence[Shard]) -> bytes:
    """Header of a safetensors file: the length of a JSON object, and the object, padded with spaces."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", "unisono.checkpoint": save_id}}
    offset = 0
    for portion in portions:
        length = portion.stop - portion.start
        label, shape = _label(portion)
        while label in entries:
            label += "~"
        kind, stored = safetensors_form(portion.dtype, shape)
        entries[label] = {"dtype": kind, "shape": stored, "data_offsets": [offset, offset + length]}
        offset += length
    text = json.dumps(entries, separators=(",", ":")).encode()
    padding = -(8 + len(text)) % _ALIGNED
    return (len(text) + padding).to_bytes(8, "little") + text + b" " * padding


def _label(portion: Shard) -> tuple[str, tuple[int, ...]]:
    """Name and shape of a portion; a slice is flat, and named by its range of elements."""
    item = portion.dtype.itemsize
    first = portion.start // item
    last = portion.stop // item
    count = 1
    for length in portion.shape:
        count *= length
    if (first, last) == (0, count):
        return portion.name, portion.shape
    return f"{portion.name}[{first}:{last}]", (last - first,)
