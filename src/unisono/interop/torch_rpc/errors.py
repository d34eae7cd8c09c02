"""Errors of the classes that torch raises, where unisono's own are of another one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from unisono.rpc.remote_errors import RemoteError

__all__ = ["ArgumentError", "as_in_torch", "as_runtime_error"]


class ArgumentError(RuntimeError, ValueError):
    """An argument that torch refuses with a RuntimeError, and unisono with a ValueError."""


@contextmanager
def as_in_torch() -> Iterator[None]:
    """Raise an `ArgumentError` in place of a `ValueError`, unless a function on another rank has raised it."""
    try:
        yield
    except (RemoteError, ArgumentError):
        raise
    except ValueError as error:
        raise ArgumentError(str(error)) from error


@contextmanager
def as_runtime_error() -> Iterator[None]:
    """Raise a RuntimeError in place of any other exception, as torch's backward passes do."""
    try:
        yield
    except RuntimeError:
        raise
    except Exception as error:
        raise RuntimeError(str(error)) from error
