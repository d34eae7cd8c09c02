"""Codecs for dataclasses, enums and NamedTuples. A class is sent by name, and found only if it is already imported."""

from __future__ import annotations

import dataclasses
import enum
import sys
from types import MemberDescriptorType, ModuleType
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

from unisono.serialization.builtins import put_items, take_items
from unisono.serialization.format import (
    Encoder,
    Parts,
    UnsendableError,
    View,
    add_decoders,
    head,
    put_text,
    read,
    take_text,
    write,
)

__all__ = ["class_of", "find", "register"]

ClassT = TypeVar("ClassT", bound=type[Any])

# A script's module is called `__main__` in the script itself, and `__mp_main__` in processes that multiprocessing
# starts from it.
_MAIN = ("__main__", "__mp_main__")

# The classes passed to `register`. Global, because a received name must resolve to a single class in the process.
_registered: dict[str, type[Any]] = {}
# The cached encoder of each class. The keys are weak, so that a local class can be freed.
_encoders: WeakKeyDictionary[type[Any], Encoder] = WeakKeyDictionary()
# The cached result of `_hook` for each class, also with weak keys.
_hooks: WeakKeyDictionary[type[Any], str] = WeakKeyDictionary()


def register(cls: ClassT) -> ClassT:
    """Register a dataclass, enum or NamedTuple that cannot be found by name, such as a local class.

    Registration also permits classes whose `__del__` or property setters run when a value is received; unless
    registered, such classes are rejected. Every process that sends or receives the class must register it. Usable as a
    decorator.

    Raises:
        TypeError: The class is not a dataclass, enum or NamedTuple.

    Example:
        >>> import dataclasses
        >>> from unisono.serialization import decode, encode
        >>> def point(x):
        ...     @register
        ...     @dataclasses.dataclass
        ...     class Point:
        ...         x: int
        ...
        ...     return Point(x)
        >>> decode(encode(point(3))).x
        3
    """
    if _kind(cls) is None:
        raise TypeError(f"{cls!r} is not a dataclass, an enum or a NamedTuple")
    _registered[_name(cls)] = cls
    return cls


def find(cls: type[Any]) -> Encoder | None:
    """Return the encoder of a dataclass, an enum or a NamedTuple; None for any other class."""
    known = _encoders.get(cls)
    kind = None if known else _kind(cls)
    if kind is None:
        return known
    name = _name(cls)
    if class_of(name) is not cls:
        raise UnsendableError(
            f"a {name}, which no process can find by that name (pass the class to unisono.serialization.register)"
        )
    if hook := _hook(name, cls):
        raise UnsendableError(f"a {name}, which {hook}")
    encoder = _encoders[cls] = _ENCODERS[kind](name, cls)
    return encoder


def _kind(cls: type[Any]) -> str | None:
    if issubclass(cls, enum.Flag):
        return "flag"
    if issubclass(cls, enum.Enum):
        return "enum"
    if issubclass(cls, tuple):
        return "tuple" if isinstance(getattr(cls, "_fields", None), tuple) else None
    # Look only at the class itself: a subclass that is not a dataclass would be sent with only its parent's fields.
    return "dataclass" if "__dataclass_fields__" in vars(cls) else None


def _name(cls: type[Any]) -> str:
    module = _MAIN[0] if cls.__module__ in _MAIN else cls.__module__
    return f"{module}:{cls.__qualname__}"


def class_of(name: str) -> type[Any] | None:
    """Return the class with this name, or None if it is unknown. Only dictionaries are read, so no code can run."""
    if name in _registered:
        return _registered[name]
    module, _, qualname = name.partition(":")
    for candidate in _MAIN if module == _MAIN[0] else (module,):
        found: Any = sys.modules.get(candidate)
        for part in qualname.split("."):
            namespace = object.__getattribute__(found, "__dict__") if isinstance(found, (ModuleType, type)) else {}
            found = namespace.get(part)
        if isinstance(found, type):
            return found
    return None


def _known(name: str, kind: str) -> type[Any]:
    cls = class_of(name)
    if cls is None or _kind(cls) != kind:
        raise ValueError(f"no {kind} class {name!r} is known here (import its module, or register it)")
    if hook := _hook(name, cls):
        raise ValueError(f"{name} {hook}")
    return cls


def _hook(name: str, cls: type[Any]) -> str:
    """Describe code that an unregistered class runs when a value is created or freed; "" if there is none."""
    if _registered.get(name) is cls:
        return ""
    hook = _hooks.get(cls)
    if hook is None:
        found = ["__del__"] if any("__del__" in vars(base) for base in cls.__mro__) else _setters(cls)
        allow = "when values are sent or received; to allow it, pass it to unisono.serialization.register on every rank"
        hook = _hooks[cls] = f"runs {found[0]} {allow}" if found else ""
    return hook


def _setters(cls: type[Any]) -> list[str]:
    """Return the fields that have a setter, except slots, whose setters run no Python code."""
    found = [(field, type(vars(base)[field])) for field in _fields(cls) for base in cls.__mro__ if field in vars(base)]
    return [f"the setter of {f}" for f, kind in found if hasattr(kind, "__set__") and kind is not MemberDescriptorType]


def _fields(cls: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls)) if dataclasses.is_dataclass(cls) else ()


# -- encoders, each made once per class ------------------------------------------------------------
def _start(kind: str, name: str) -> bytes:
    parts: Parts = [kind.encode()]
    put_text(parts, name)
    return b"".join(parts)


def _dataclass_encoder(name: str, cls: type[Any]) -> Encoder:
    try:
        object.__new__(cls)
    except TypeError:
        raise UnsendableError(f"a {name}, which cannot be recreated from its fields alone") from None
    fields = _fields(cls)
    # Also send the field names, so that the receiver detects a different version of the class.
    start = _start("D", f"{name}({','.join(fields)})") + head("t", len(fields))[1:]

    def encoder(parts: Parts, value: object, depth: int) -> None:
        parts.append(start)
        try:
            put_items(parts, [getattr(value, field) for field in fields], depth)
        except AttributeError as error:
            raise UnsendableError(f"a {name} without all of its fields ({error})") from None
        except UnsendableError as error:
            index = int(error.path.pop()[1:-1])
            error.path.append(f".{fields[index]}")
            raise

    return encoder


def _tuple_encoder(name: str, _cls: type[Any]) -> Encoder:
    start = _start("P", name)

    def encoder(parts: Parts, value: tuple[Any, ...], depth: int) -> None:
        parts.extend((start, head("t", len(value))[1:]))
        put_items(parts, value, depth)

    return encoder


def _enum_encoder(name: str, _cls: type[Any]) -> Encoder:
    start = _start("E", name)

    def encoder(parts: Parts, value: enum.Enum, _depth: int) -> None:
        parts.append(start)
        put_text(parts, value.name)

    return encoder


def _flag_encoder(name: str, _cls: type[Any]) -> Encoder:
    start = _start("G", name)

    # Send the number of a flag, because a combination of flags has no name.
    def encoder(parts: Parts, value: enum.Flag, depth: int) -> None:
        parts.append(start)
        write(parts, int(value.value), depth)

    return encoder


_ENCODERS = {"dataclass": _dataclass_encoder, "tuple": _tuple_encoder, "enum": _enum_encoder, "flag": _flag_encoder}


# -- decoders --------------------------------------------------------------------------------------
def _take_dataclass(view: View, at: int, depth: int) -> tuple[Any, int]:
    text, at = take_text(view, at + 1)
    name, _, names = text.removesuffix(")").partition("(")
    cls = _known(name, "dataclass")
    fields = _fields(cls)
    items, at = take_items(view, at, depth)
    if names != ",".join(fields) or len(items) != len(fields):
        raise ValueError(f"the fields of {name} differ between sender and receiver; run the same code on every rank")
    value = object.__new__(cls)
    for field, item in zip(fields, items, strict=True):
        object.__setattr__(value, field, item)
    return value, at


def _take_tuple(view: View, at: int, depth: int) -> tuple[Any, int]:
    name, at = take_text(view, at + 1)
    cls = _known(name, "tuple")
    items, at = take_items(view, at, depth)
    if len(items) != len(cls._fields):
        raise ValueError(f"{name} has {len(cls._fields)} fields, not {len(items)}")
    return tuple.__new__(cls, items), at


def _take_enum(view: View, at: int, depth: int) -> tuple[Any, int]:
    name, at = take_text(view, at + 1)
    cls = _known(name, "enum")
    member, at = read(view, at, depth)
    return cls.__members__[member], at


def _take_flag(view: View, at: int, depth: int) -> tuple[Any, int]:
    name, at = take_text(view, at + 1)
    cls = _known(name, "flag")
    number, at = read(view, at, depth)
    if type(number) is not int:
        raise ValueError(f"a {name} is a number, not a {type(number).__name__}")
    return _flag(cls, number), at


def _flag(cls: Any, number: int) -> enum.Flag:
    """Return the flag with this value. Calling `cls` would run `_missing_` and cache each combination forever."""
    known: enum.Flag | None = cls._value2member_map_.get(number)
    if known is not None:
        return known
    unknown = number & ~cls._flag_mask_
    kind = cls._member_type_
    if number < 0 or (unknown and cls._boundary_ is not enum.KEEP) or kind not in (int, object):
        raise ValueError(f"{cls.__qualname__} has no value {number}")
    member: Any = int.__new__(cls, number) if kind is int else object.__new__(cls)
    names = [known.name for known in cls if known.value & number]
    object.__setattr__(member, "_value_", number)
    object.__setattr__(member, "_name_", "|".join([*names, *([str(unknown)] if unknown else [])]) or None)
    return cast("enum.Flag", member)


add_decoders({"D": _take_dataclass, "P": _take_tuple, "E": _take_enum, "G": _take_flag})
