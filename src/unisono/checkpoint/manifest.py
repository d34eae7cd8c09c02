"""The manifest: a checkpoint's table of contents, with digests. A directory without a manifest is not a checkpoint.

The manifest is one line of JSON, preceded by the digest of the line. Every manifest that is read from a file is
validated first: every byte of every file must belong to one tensor or header, and file names must not point outside the
directory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
import xxhash

from unisono.checkpoint.errors import CorruptError, FormatError, listed
from unisono.checkpoint.tree import DTYPE_NAMES, Node, dtype_of, tagged

__all__ = [
    "BLOCK",
    "CHUNK",
    "FILE",
    "GRANTED",
    "HELD",
    "MANIFEST",
    "OF_MANIFEST",
    "VERSION",
    "FileEntry",
    "FilePiece",
    "Manifest",
    "TensorEntry",
    "blocks",
    "check_size",
    "cost_of",
    "digest",
    "hasher",
]

MANIFEST = "manifest.json"
VERSION = 1
FILE = re.compile(r"([0-9a-f]{16})-\d{5}\.safetensors")
"""Names of tensor files: the save's identifier, and the rank that wrote the file."""

_ALGORITHM = "xxh3-128"
"""Digest algorithm: xxh3 with 128 bits, which detects damage at memory speed but does not protect against forgery."""
BLOCK = 4 << 20
"""Number of bytes of a tensor that share a digest; ranks read and check tensors in such blocks."""
CHUNK = 1 << 19
"""Number of bytes to hash and then copy at a time, small enough to remain in the CPU cache in between."""

_FORMAT = "unisono.checkpoint"
_FILE = b'{"digest":"%b","manifest":%b}\n'
"""The whole file: the manifest's digest, and the manifest."""
_FRAME = re.compile(rb'\{"digest":"([0-9a-f]{32})","manifest":(.*)\}\n', re.DOTALL)
"""Matches `_FILE`."""
_HEX = re.compile(r"[0-9a-f]{32}")
_ID = re.compile(r"[0-9a-f]{16}")
_VERSION_WITHIN = 256
"""Number of bytes at the file's start that contain the version, with room for other fields before it."""
_VERSION_FIELD = re.compile(rb'"format":"unisono.checkpoint","version":(\d{1,9})[,}]')
_DEVICE = re.compile(r"[a-z]+(:\d{1,3})?")
_DIMENSIONS = 64

GRANTED = 16 << 20
"""Bytes of memory that loading may use beyond twice the files' size: Python values are larger than their JSON.
"""
OF_MANIFEST = 24
"""Bytes of memory per byte of a manifest, calculated from the costs below for entries of the smallest tensors."""
HELD = 4 << 20
"""Maximum number of bytes per rank that are kept in memory until all tensors are known to be intact."""

# Largest measured memory cost of each JSON delimiter, in bytes: the parsed value plus the object built from it.
_MARKS = {b",": 66, b"[": 118, b"{": 207, b'"': 48}
# A number in a list costs a list slot and an object.
_NUMBER = 40
_COPIED = ("$array", "$scalar", "$bytes", "$bytearray")


class FileEntry(NamedTuple):
    """A file: its name, its size and the size of its header in bytes, and the digests of header and file.

    The file's digest is for external tools. unisono compares the digests of the header and of each tensor's blocks,
    which together cover the file.
    """

    name: str
    size: int
    header: int
    header_digest: str
    digest: str


class FilePiece(NamedTuple):
    """Contiguous bytes of a tensor: bytes `start` to `stop` of file number `file`, with a digest per block."""

    file: int
    start: int
    stop: int
    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor, whose bytes are the concatenation of its pieces."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str = "cpu"
    pieces: tuple[FilePiece, ...] = ()

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Manifest:
    """Metadata of a checkpoint: everything except the tensors' bytes.

    Attributes:
        id: A hexadecimal number, unique to each save.
        ranks: Number of ranks that saved the checkpoint.
        created_ns: Time of the save in ns since 1970. Within one `Checkpointer`, `created_ns` increases from save to
            save, even if the clock is set back.
        files, tensors: The files, and the tensors with their locations in the files.
        state: Tree of the part of the state that is common to all ranks.
        per_rank: For each rank, the tree of its per-rank values.
        extra: Values passed to `save` as `extra`, and the versions of unisono and torch that wrote the checkpoint.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp()
        >>> un.checkpoint.save(path, {"w": torch.zeros(3)})
        >>> manifest = un.checkpoint.verify(path)
        >>> manifest.ranks, manifest.tensors["w"].shape, manifest.names_in_file(0)
        (1, (3,), ['w'])
        >>> un.checkpoint.Manifest.from_bytes(manifest.to_bytes(), manifest.nbytes) == manifest
        True
        >>> manifest.check_sizes({file.name: file.size for file in manifest.files})
    """

    id: str
    ranks: int
    created_ns: int
    files: tuple[FileEntry, ...]
    tensors: Mapping[str, TensorEntry]
    state: Node
    per_rank: tuple[tuple[Node, ...], ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Total size in bytes of all files except the manifest."""
        return sum([file.size for file in self.files])

    def names_in_file(self, index: int) -> list[str]:
        """Return the names of the tensors that have bytes in a file; if there are none, the names of all tensors.

        Args:
            index: Position of the file in `files`.
        """
        found = [name for name, entry in self.tensors.items() if any(p.file == index for p in entry.pieces)]
        return found or list(self.tensors)

    def to_bytes(self) -> bytes:
        """Return the contents of the manifest's file.

        Raises:
            FormatError: The values exceed the memory limit, so `from_bytes` would reject them.
        """
        tensors = {
            name: {
                "dtype": DTYPE_NAMES[entry.dtype],
                "shape": entry.shape,
                "device": entry.device,
                "pieces": entry.pieces,
            }
            for name, entry in self.tensors.items()
        }
        content = {
            "format": _FORMAT,
            "version": VERSION,
            "digest": _ALGORITHM,
            "block": BLOCK,
            "id": self.id,
            "ranks": self.ranks,
            "created_ns": self.created_ns,
            "extra": self.extra,
            "files": self.files,
            "tensors": tensors,
            "state": self.state,
            "per_rank": self.per_rank,
        }
        body = json.dumps(content, separators=(",", ":"), allow_nan=False).encode("ascii")
        self._check_memory(cost_of(body))
        return _FILE % (digest(body).encode(), body)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray, nbytes: int = 0) -> Manifest:
        """Parse and validate a manifest.

        Args:
            data: Contents of the file.
            nbytes: Total size of all other files in bytes, which limits the memory that the manifest's values may use.

        Returns:
            The manifest, whose pieces and headers cover each file exactly.

        Raises:
            FormatError: The data has a newer format version, is not a manifest, or would use too much memory.
            CorruptError: The data is damaged.
        """
        text = cost_of(data)
        content = _opened(data, text, nbytes)
        try:
            _check_texts(_ID, content["id"])
            _check_counts(content["ranks"], content["created_ns"])
            manifest = cls(
                id=content["id"],
                ranks=content["ranks"],
                created_ns=content["created_ns"],
                files=tuple(map(_file, content["files"])),
                tensors={name: _tensor(entry, content["block"]) for name, entry in content["tensors"].items()},
                state=content["state"],
                per_rank=tuple(map(tuple, content["per_rank"])),
                extra=dict(content["extra"]),
            )
            _check_tiling(manifest)
            manifest._check_memory(text)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError) as error:
            raise FormatError(f"its manifest is not one that unisono writes ({_describe(error)})") from None
        return manifest

    def _check_memory(self, text: int) -> None:
        """Raise an error unless each value is referred to exactly once and all values respect the memory limit.

        Args:
            text: Memory cost of the manifest itself.

        Raises:
            FormatError: The values would take too much memory, or are nested too deeply.
            ValueError, LookupError: A reference to a per-rank value is invalid or repeated, or a tensor is unknown.
        """
        referred: set[Any] = set()
        cost = text
        trees = [tree for trees in self.per_rank for tree in trees]
        for top in (self.state, trees):
            for tag, body in tagged(top):
                if tag == "$numbers":
                    cost += prod(self.tensors[body].shape) * _NUMBER
                elif tag in _COPIED and not isinstance(body, str):
                    cost += 2 * self.tensors[body["$tensor"] if isinstance(body, dict) else body[2]].nbytes
                elif tag == "$rank":
                    if top is trees or type(body[0]) is not int or body[0] < 0 or body[0] in referred:
                        raise ValueError("a value of one rank appears in two places")
                    referred.add(body[0])
        _check_cost(cost, self.nbytes)

    def check_sizes(self, sizes: Mapping[str, int]) -> None:
        """Raise an error unless every file exists with its full length.

        Args:
            sizes: Size in bytes of each file that exists, as `Storage.sizes` returns it.

        Raises:
            CorruptError: A file is missing or has the wrong size; the message names its tensors.
        """
        for index, file in enumerate(self.files):
            check_size(self, index, sizes.get(file.name))


def check_size(manifest: Manifest, index: int, found: int | None) -> None:
    """Raise `CorruptError` unless a file exists with its full length; the error names the file's tensors.

    Args:
        manifest: The manifest that lists the file.
        index: Position of the file in `files`.
        found: Size of the file in bytes; None if the file is missing.
    """
    file = manifest.files[index]
    if found != file.size:
        names = manifest.names_in_file(index)
        problem = "is missing" if found is None else f"has {found} bytes instead of {file.size}"
        raise CorruptError(f"{file.name} {problem}; it is the file of {listed(names)}", tensors=names)


def _opened(data: bytes | bytearray, cost: int, nbytes: int) -> dict[str, Any]:
    """Parse the manifest's JSON, if the digest matches and this version can read the format."""
    frame = _FRAME.fullmatch(data)
    body = memoryview(data)[frame.start(2) : frame.end(2)] if frame else memoryview(b"")
    intact = frame is not None and frame[1] == digest(body).encode()
    found = _VERSION_FIELD.search(data, 0, _VERSION_WITHIN)
    if found and int(found[1]) > VERSION:
        doubt = "" if intact else f", or {MANIFEST} is damaged: its digest does not fit"
        raise FormatError(
            f"it has format version {found[1].decode()}, but this unisono reads versions up to {VERSION}; "
            f"update unisono{doubt}"
        )
    if not intact:
        raise CorruptError(f"{MANIFEST} is damaged: its digest does not fit")
    _check_cost(cost, nbytes)
    try:
        content = json.loads(str(body, "ascii"))
        version = content["version"]
        kind = content["format"]
    except (ValueError, RecursionError, LookupError, TypeError):
        raise FormatError(f"{MANIFEST} was not written by unisono") from None
    if kind != _FORMAT or version != VERSION or content.get("digest") != _ALGORITHM:
        raise FormatError(f"{MANIFEST} is of the unknown format {kind!r:.80}, version {version!r:.80}")
    return dict(content)


def _check_counts(*values: object) -> None:
    for value in values:
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise ValueError(f"{value!r:.40} is not a count")


def _check_texts(pattern: re.Pattern[str], *values: object) -> None:
    for value in values:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise ValueError(f"{value!r:.40} is not allowed there")


def _file(entry: Any) -> FileEntry:
    name, size, header, header_digest, file_digest = entry
    _check_texts(FILE, name)
    _check_counts(size, header)
    _check_texts(_HEX, header_digest, file_digest)
    return FileEntry(name, size, header, header_digest, file_digest)


def _tensor(entry: Any, block: object) -> TensorEntry:
    if block != BLOCK:
        raise ValueError(f"blocks of {block!r:.40} bytes")
    shape = tuple(entry["shape"])
    _check_counts(*shape)
    _check_texts(_DEVICE, entry["device"])
    if len(shape) > _DIMENSIONS:
        raise ValueError(f"{len(shape)} dimensions")
    pieces = []
    for file, start, stop, digests in entry["pieces"]:
        piece = FilePiece(file, start, stop, tuple(digests))
        _check_counts(file, start, stop)
        _check_texts(_HEX, *digests)
        if piece.stop < piece.start or len(piece.digests) != -((piece.start - piece.stop) // BLOCK):
            raise ValueError("other digests than blocks")
        pieces.append(piece)
    return TensorEntry(dtype_of(entry["dtype"]), shape, entry["device"], tuple(pieces))


def _check_tiling(manifest: Manifest) -> None:
    """Check that pieces and headers cover each file exactly once, and that each tensor has all its bytes."""
    if len({file.name for file in manifest.files}) != len(manifest.files):
        raise ValueError("a file is listed twice")
    if len(manifest.per_rank) != manifest.ranks:
        raise ValueError("the number of ranks differs from the number of rank states")
    spans: list[list[tuple[int, int]]] = [[(0, file.header)] for file in manifest.files]
    for name, entry in manifest.tensors.items():
        if sum([piece.stop - piece.start for piece in entry.pieces]) != entry.nbytes:
            raise ValueError(f"{name!r:.80} has other bytes than its shape")
        for piece in entry.pieces:
            spans[piece.file].append((piece.start, piece.stop))
    for file, found in zip(manifest.files, spans, strict=True):
        _check_spans(file, found)


def _check_spans(file: FileEntry, spans: list[tuple[int, int]]) -> None:
    """Check that the spans of the header and of at least one piece cover a file exactly once."""
    if len(spans) == 1:
        raise ValueError(f"{file.name} has no tensor")
    position = 0
    for start, stop in sorted(spans):
        if start != position:
            raise ValueError(f"bytes of {file.name} belong to none, or to two")
        position = stop
    if position != file.size:
        raise ValueError(f"{file.name} has another size")


def cost_of(text: bytes | bytearray) -> int:
    """Return how many bytes of memory the values in a JSON text can take, beyond `OF_MANIFEST` per byte of text."""
    return max(0, sum([text.count(mark) * cost for mark, cost in _MARKS.items()]) - OF_MANIFEST * len(text))


def _check_cost(cost: int, nbytes: int) -> None:
    """Raise `FormatError` if `cost` exceeds the limit for a checkpoint whose files have `nbytes` bytes.

    Loading may use twice the size of the checkpoint's files, plus `GRANTED` bytes. At most `HELD` bytes of tensors are
    in memory twice, so the checkpoint's plain values may take the memory that second copies of all other tensors would
    need.
    """
    if cost > GRANTED + max(0, nbytes - HELD):
        raise FormatError(
            f"its values take about {cost >> 20} MiB of memory, too much for {nbytes} bytes of files; "
            "keep long lists and dicts as tensors"
        )


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]


hasher = xxhash.xxh3_128
"""Factory of an object with `update` and `hexdigest`."""

digest: Callable[..., str] = xxhash.xxh3_128_hexdigest
"""Digest of all bytes of a buffer: 32 hexadecimal digits."""


def blocks(start: int, stop: int, most: int = BLOCK) -> list[tuple[int, int]]:
    """Cut a range into pieces of at most `most` bytes.

    Example:
        >>> blocks(10, 15, 2)
        [(10, 12), (12, 14), (14, 15)]
    """
    return [(low, min(low + most, stop)) for low in range(start, stop, most)]
