"""A torch store on top of the control plane, so that torch's process groups need no TCPStore."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from unisono.core import clock
from unisono.core.control import ControlPlane
from unisono.core.group import Group

__all__ = ["ControlStore"]


class ControlStore(dist.Store):
    """A `torch.distributed.Store` that keeps its keys under a prefix in a control plane.

    Args:
        control: This rank's control-plane handle, which must outlive the store.
        prefix: Prefix of all keys. Stores with different prefixes are independent.
        timeout_s: Seconds that `get` and `wait` wait for a key, unless changed by `set_timeout`.
        group: Group whose failure also ends `get` and `wait`.

    Example:
        >>> from unisono.control import LocalHub
        >>> store = ControlStore(LocalHub().control(), "gloo/world")
        >>> store.set("host", "here")
        >>> store.get("host")
        b'here'
    """

    # Torch's own code sets this attribute, although torch's annotations do not declare it.
    timeout: timedelta

    def __init__(
        self, control: ControlPlane, prefix: str, timeout_s: float = 300.0, group: Group | None = None
    ) -> None:
        super().__init__()
        self._group = group
        self.set_timeout(timedelta(seconds=timeout_s))
        self._control = control
        self._prefix = prefix

    def set(self, key: str, value: str | bytes) -> None:
        self._control.set(self._key(key), _bytes(value))

    def get(self, key: str) -> bytes:
        return self._control.get(self._key(key), self.timeout.total_seconds(), self._group)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        deadline = clock.now() + (self.timeout if timeout is None else timeout).total_seconds()
        for key in keys:
            self._control.get(self._key(key), deadline - clock.now(), self._group)

    def add(self, key: str, amount: int) -> int:
        return self._control.add(self._key(key), amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._control.check([self._key(key) for key in keys])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._control.compare_set(self._key(key), _bytes(expected), _bytes(desired))

    def delete_key(self, key: str) -> bool:
        return self._control.delete(self._key(key))

    def num_keys(self) -> int:
        """Return the number of keys in the whole control plane, regardless of prefix."""
        return self._control.num_keys()

    # Torch's C++ code looks up these methods by their C++ names, `deleteKey` and `getNumKeys`.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
