"""Reading of a checkpoint: which rank reads which bytes in which order, and verification of digests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter

from unisono.checkpoint.errors import CorruptError, NoCheckpointError, listed
from unisono.checkpoint.manifest import (
    BLOCK,
    CHUNK,
    FILE,
    GRANTED,
    MANIFEST,
    Manifest,
    blocks,
    check_size,
    cost_of,
    digest,
    hasher,
)
from unisono.checkpoint.storage import Source, Storage, contents
from unisono.core.closing import Closing

__all__ = [
    "Block",
    "ByteRanges",
    "Files",
    "ReadWindow",
    "assign",
    "names_in_headers",
    "read_manifest",
    "windows_of",
]

_MOST_MANIFEST = 1 << 30
_AHEAD = 16
"""Number of windows to prefetch, so that the disk continues to read while ranks wait for each other."""
_MOST_HEADER = 4 << 20
_MOST_OPEN = 256
"""Maximum number of open files: a checkpoint has one file per saving rank, and a process can usually open 1024."""


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes of a file that share a digest: a header (no `name`), or part of a tensor, starting at its byte `offset`."""

    file: int
    start: int
    stop: int
    digest: str
    name: str | None
    offset: int


@dataclass(frozen=True, slots=True)
class ReadWindow:
    """Adjacent blocks of a file that are read together, and their byte range in the file."""

    file: int
    start: int
    stop: int
    blocks: tuple[Block, ...]


ByteRanges = Mapping[str, Sequence[tuple[int, int]]]
"""Byte ranges to read from each tensor, by tensor name."""


def windows_of(manifest: Manifest, names: Iterable[str], ranges: ByteRanges | None = None) -> list[ReadWindow]:
    """Return the windows to read for the tensors in `names`, in file order, including the headers of their files.

    For a tensor in `ranges`, only the blocks that overlap its ranges are read.
    """
    needed = []
    files = set[int]()
    for name in dict.fromkeys(names):
        offset = 0
        wanted = (ranges or {}).get(name)
        for piece in manifest.tensors[name].pieces:
            if wanted is None:
                # Also if the piece is empty, and has no blocks.
                files.add(piece.file)
            cut = zip(blocks(piece.start, piece.stop), piece.digests, strict=True)
            for (start, stop), expected in cut:
                at = offset + start - piece.start
                if wanted is None or any(low < at + stop - start and at < high for low, high in wanted):
                    needed.append(Block(piece.file, start, stop, expected, name, at))
            offset += piece.stop - piece.start
    for index in files.union(block.file for block in needed):
        file = manifest.files[index]
        needed.append(Block(index, 0, file.header, file.header_digest, None, 0))
    needed.sort(key=attrgetter("file", "start"))
    groups: list[list[Block]] = []
    for block in needed:
        last = groups[-1] if groups else [block]
        if (block.file, block.start) == (last[-1].file, last[-1].stop) and block.stop - last[0].start <= BLOCK:
            last.append(block)
        else:
            groups.append([block])
    return [ReadWindow(group[0].file, group[0].start, group[-1].stop, tuple(group)) for group in groups]


def assign(windows: Sequence[ReadWindow], ranks: int) -> list[list[ReadWindow]]:
    """Assign consecutive windows to each rank, with about the same number of bytes per rank."""
    total = sum([window.stop - window.start for window in windows])
    given: list[list[ReadWindow]] = [[] for _ in range(ranks)]
    position = 0
    for window in windows:
        length = window.stop - window.start
        middle = position + length / 2
        given[min(int(middle * ranks / total), ranks - 1) if total else 0].append(window)
        position += length
    return given


class Files(Closing):
    """The files of a checkpoint, opened when first needed, and closed at the end.

    Attributes:
        cached: Whether bytes that one process has read remain cached for other processes of this host.
        identities: Identity of each opened file, equal on two ranks of a host if both read the same cached contents of
            the same file. None if the storage does not report an identity.
    """

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self._storage = storage
        self._manifest = manifest
        # User-defined storages may lack the attribute `kept`.
        self.cached: bool = bool(getattr(storage, "kept", False))
        self.identities: dict[int, list[int] | None] = {}
        self._open: dict[int, Source] = {}
        self._held: dict[Block, memoryview] = {}

    def open(self, index: int) -> Source:
        """Open a file, given its number in the manifest. Raises `CorruptError` if the file is missing or truncated."""
        if index not in self._open:
            entry = self._manifest.files[index]
            try:
                source = self._storage.open(entry.name)
            except FileNotFoundError:
                check_size(self._manifest, index, None)
                raise
            if len(self._open) == _MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()
            self._open[index] = source
            self.identities[index] = getattr(source, "identity", None)
            check_size(self._manifest, index, source.size)
        return self._open[index]

    def read(self, block: Block, into: memoryview, *, check: bool = True) -> bool:
        """Read a block into memory of the block's size; with `check`, return whether the bytes match their digest."""
        if block in self._held:
            into[:] = self._held.pop(block)
            return True
        source = self.open(block.file)
        if not check:
            source.read(block.start, into)
            return True
        state = hasher()
        for low in range(0, len(into), CHUNK):
            chunk = into[low : low + CHUNK]
            source.read(block.start + low, chunk)
            state.update(chunk)
        return bool(state.hexdigest() == block.digest)

    def prefetch(self, windows: Sequence[ReadWindow], number: int) -> None:
        """Start reading ahead from the disk, for a caller that is about to read `windows[number]`."""
        for window in windows[:_AHEAD] if not number else windows[number + _AHEAD - 1 : number + _AHEAD]:
            self.open(window.file).prefetch(window.start, window.stop)

    def check(
        self, windows: Sequence[ReadWindow], *, hold: bool = False, on_bytes: Callable[[int], None] | None = None
    ) -> None:
        """Read all of `windows`, and raise `CorruptError` if any window is damaged.

        Args:
            windows: Windows to check.
            hold: Whether to keep the windows' bytes in memory, so that they are not read again.
            on_bytes: Called with the number of bytes in each checked window.
        """
        longest = max([window.stop - window.start for window in windows], default=0)
        bad: list[Block] = []
        spare = memoryview(bytearray(0 if hold else longest))
        for number, window in enumerate(windows):
            self.prefetch(windows, number)
            if hold:
                bad += [block for block in window.blocks if not self._hold(block)]
            else:
                bad += self._damaged(window, spare[: window.stop - window.start])
            if on_bytes is not None:
                on_bytes(window.stop - window.start)
        self.corrupt_error(bad)

    def _hold(self, block: Block) -> bool:
        """Read a block and keep its bytes, if they match their digest; return whether they do."""
        into = memoryview(bytearray(block.stop - block.start))
        intact = self.read(block, into)
        if intact:
            self._held[block] = into
        return intact

    def _damaged(self, window: ReadWindow, into: memoryview) -> list[Block]:
        """Read a window into memory of its size, and return its damaged blocks."""
        if len(window.blocks) == 1:
            # A large block is hashed in chunks while they are in the CPU cache.
            return [block for block in window.blocks if not self.read(block, into)]
        # Small blocks are read together: there may be thousands.
        self.open(window.file).read(window.start, into)
        start = window.start
        return [
            block for block in window.blocks if digest(into[block.start - start : block.stop - start]) != block.digest
        ]

    def corrupt_error(self, bad: Sequence[Block]) -> None:
        """If there are damaged blocks, raise a `CorruptError` that names every tensor with bytes in these blocks."""
        if not bad:
            return
        names: dict[str, None] = {}
        for block in bad:
            names.update(dict.fromkeys([block.name] if block.name else self._manifest.names_in_file(block.file)))
        first = bad[0]
        file = self._manifest.files[first.file].name
        subject = listed(list(names)) if first.name else f"the header of {file}, the file of {listed(list(names))},"
        raise CorruptError(
            f"damaged: {subject} {'has' if len(names) == 1 else 'have'} other bytes than were saved "
            f"(the first in {file} between bytes {first.start} and {first.stop})",
            tensors=list(names),
        )

    def close(self) -> None:
        """Close the files."""
        for source in self._open.values():
            source.close()
        self._open.clear()


def read_manifest(storage: Storage) -> tuple[Manifest, bytearray]:
    """Return the manifest of a checkpoint, parsed and as bytes.

    Raises:
        NoCheckpointError: Nothing exists at the path, or only an unfinished save.
        CorruptError, FormatError: The manifest is damaged, or has a newer version.
        OSError: The manifest cannot be read.
    """
    sizes = storage.sizes()
    if MANIFEST not in sizes:
        rest = [name for name in sizes if FILE.fullmatch(name)]
        raise NoCheckpointError("a save there was never finished" if rest else "there is none")
    if sizes[MANIFEST] > _MOST_MANIFEST:
        raise CorruptError(
            f"{MANIFEST} has {sizes[MANIFEST]} bytes, more than any manifest", tensors=names_in_headers(storage)
        )
    try:
        data = contents(storage, MANIFEST)
    except FileNotFoundError:
        # Another process has removed the checkpoint in the meantime.
        raise NoCheckpointError("there is none") from None
    try:
        manifest = Manifest.from_bytes(data, sum([size for name, size in sizes.items() if FILE.fullmatch(name)]))
    except CorruptError as error:
        names = names_in_headers(storage)
        if not names:
            raise
        raise CorruptError(f"{error.message}; its tensors are {listed(names)}", tensors=names) from error.__cause__
    return manifest, data


def names_in_headers(storage: Storage) -> list[str]:
    """Return the tensor names in the files' headers, for messages if the manifest is unusable."""
    names: dict[str, None] = {}
    for name in filter(FILE.fullmatch, sorted(storage.sizes())):
        with suppress(OSError, ValueError, RecursionError, TypeError):
            data = contents(storage, name, _MOST_HEADER)
            length = int.from_bytes(data[:8], "little")
            text = data[8 : 8 + length]
            if length == len(text) and cost_of(text) <= GRANTED:
                found = json.loads(text)
                names.update(dict.fromkeys(str(n).partition("[")[0] for n in found if n != "__metadata__"))
    return list(names)
