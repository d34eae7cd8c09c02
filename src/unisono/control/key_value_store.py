"""Key-value store of the control plane, and the requests that are waiting for a key."""

from __future__ import annotations

__all__ = ["KeyValueStore"]


class KeyValueStore:
    """In-memory map from keys to bytes. Never blocks: a request that must wait is kept until its key is set."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[tuple[int, int]]] = {}

    def __len__(self) -> int:
        return len(self._values)

    def set(self, key: str, value: bytes) -> list[tuple[int, int]]:
        """Set the key, and return the requests (client and request) that were waiting for it."""
        self._values[key] = value
        return self._waiting.pop(key, [])

    def get(self, key: str, client: int, request: int) -> bytes | None:
        """Return the value; if the key is not set, return None and queue this request, which `set` will return."""
        value = self._values.get(key)
        if value is None:
            self._waiting.setdefault(key, []).append((client, request))
        return value

    def forget(self, client: int, request: int | None = None) -> None:
        """Remove a client's waiting request; if `request` is None, remove all of the client's waiting requests."""
        for key, waiting in list(self._waiting.items()):
            waiting[:] = [
                (holder, number) for holder, number in waiting if holder != client or request not in (None, number)
            ]
            if not waiting:
                del self._waiting[key]

    def add(self, key: str, amount: int) -> tuple[int, list[tuple[int, int]]]:
        """Return the counter's new value, and the requests that were waiting for it to exist."""
        total = int(self._values.get(key, b"0")) + amount
        return total, self.set(key, b"%d" % total)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> tuple[bytes, list[tuple[int, int]]]:
        """Set the key if its value is `expected`, or if the key is absent and `expected` is empty.

        Return the value after the call (`expected` if the key is still absent), and the requests that waited for the
        key.
        """
        present = self._values.get(key)
        if present == expected or (present is None and not expected):
            return desired, self.set(key, desired)
        return (expected if present is None else present), []

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def drop(self, prefixes: tuple[str, ...], excluded: tuple[str, ...] = ()) -> None:
        """Delete all keys with one of these prefixes, except those with a prefix in `excluded`."""
        for key in [key for key in self._values if key.startswith(prefixes) and not key.startswith(excluded)]:
            del self._values[key]

    def delete(self, key: str) -> bool:
        return self._values.pop(key, None) is not None
