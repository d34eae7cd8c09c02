"""Directories of `torch.distributed.checkpoint` (DCP).

A DCP directory contains a pickle file, `.metadata`, which we read with an unpickler that allows only the classes that
DCP writes.
"""

from __future__ import annotations

import io
import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata

from unisono.checkpoint.errors import CorruptError, FormatError

__all__ = ["SUFFIXES", "read", "recognises", "write"]

SUFFIXES = (".dcp",)

_STRANGE = "its .metadata names {}, which does not belong there"


def _member(kind: Any, name: Any) -> Any:
    """Return a member of an enumeration, which Python before 3.11.4 pickles as a getattr call."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and isinstance(name, str) and name in kind.__members__):
        raise FormatError(_STRANGE.format(f"{name!r} of {kind!r}"))
    return kind[name]


_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_CLASSES: dict[str, dict[str, Any]] = {
    "torch": {"Size": torch.Size, **_DTYPES},
    "torch.serialization": {"_get_layout": lambda name: torch.strided},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo": filesystem._StorageInfo},
    "torch.distributed.checkpoint.metadata": {
        name: getattr(metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
        if hasattr(metadata, name)
    },
    "pathlib": {"PosixPath": Path, "PurePosixPath": Path},
    "pathlib._local": {"PosixPath": Path},
    "collections": {"OrderedDict": dict},
    "builtins": {"getattr": _member},
}


def recognises(path: Path) -> bool:
    """Return whether the path is a directory with a `.metadata` file."""
    return (path / ".metadata").is_file()


def write(path: Path, state: Any) -> None:
    """Write with `torch.distributed.checkpoint.save` in one process. Dict keys become strings."""
    dcp.save(state, checkpoint_id=path, no_dist=True)


def read(path: Path, trusted: bool) -> Any:
    """Return the state, assembled from all ranks' files. Unless `trusted`, unpickles only classes that torch allows.

    Raises:
        FormatError: The metadata is unreadable, or refers to a class that DCP does not write.
        CorruptError: A file is missing or truncated.
    """
    try:
        found = _MetadataUnpickler(io.BytesIO((path / ".metadata").read_bytes())).load()
        locations = {(index.fqn, _offset(index.offset)): info for index, info in found.storage_data.items()}
        flat = {
            name: _value(path, name, entry, locations, trusted) for name, entry in found.state_dict_metadata.items()
        }
        return _nested(flat, found.planner_data or {})
    except (FormatError, CorruptError, OSError):
        raise
    except Exception as error:
        raise FormatError(f"{path} is not a readable DCP checkpoint ({error})") from error


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _CLASSES[module][name]
        except KeyError:
            raise FormatError(_STRANGE.format(f"{module}.{name}")) from None


def _offset(offset: Any) -> tuple[int, ...]:
    return tuple(offset or ())


def _value(path: Path, name: str, entry: Any, locations: dict[Any, Any], trusted: bool) -> Any:
    if not isinstance(entry, metadata.TensorStorageMetadata):
        return _load(path, name, locations[name, ()], trusted)
    tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
    for chunk in entry.chunks:
        part = _load(path, name, locations[name, _offset(chunk.offsets)], trusted)
        view = tensor
        for dimension, (start, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            view = view.narrow(dimension, start, length)
        view.copy_(part)
    return tensor


def _load(path: Path, name: str, info: Any, trusted: bool) -> Any:
    if Path(info.relative_path).name != info.relative_path or getattr(info, "transform_descriptors", None):
        raise FormatError(f"{name!r} is in {info.relative_path!r}, or is transformed: not supported")
    with (path / info.relative_path).open("rb") as file:
        file.seek(info.offset)
        data = file.read(info.length)
    if len(data) != info.length:
        raise CorruptError(f"{info.relative_path} ends before {name!r} does", tensors=[name])
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=not trusted)


def _nested(flat: dict[str, Any], paths: dict[str, tuple[str | int, ...]]) -> Any:
    """Rebuild nested dicts and lists from a flat dict of values and the path of each name."""
    root: dict[Any, Any] = {}
    for name, value in flat.items():
        steps = paths.get(name, (name,))
        here = root
        for step in steps[:-1]:
            here = here.setdefault(step, {})
        here[steps[-1]] = value
    return _lists(root)


def _lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    inner = {key: _lists(item) for key, item in value.items()}
    if inner and set(inner) == set(range(len(inner))) and all(type(key) is int for key in inner):
        return [inner[index] for index in range(len(inner))]
    if inner.keys() == {"state", "param_groups"} and isinstance(inner["state"], dict):
        # DCP has turned an optimizer's parameter numbers into strings.
        inner["state"] = {int(key) if key.isdecimal() else key: item for key, item in inner["state"].items()}
    return inner
