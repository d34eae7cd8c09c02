"""The key-value store: what is set, and who waits for what is not set yet."""

from __future__ import annotations

__all__ = ["KeyValueStore"]


class KeyValueStore:
    """Bytes by name, in memory. Nothing here waits: who must is kept until the key is set."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[tuple[int, int]]] = {}

    def __len__(self) -> int:
        return len(self._values)

    def set(self, key: str, value: bytes) -> list[tuple[int, int]]:
        """Set, and return who (client and request) has been waiting for it."""
        self._values[key] = value
        return self._waiting.pop(key, [])

    def get(self, key: str, client: int, request: int) -> bytes | None:
        """The value; or None, and then `set` will tell of this request."""
        value = self._values.get(key)
        if value is None:
            self._waiting.setdefault(key, []).append((client, request))
        return value

    def forget(self, client: int, request: int | None = None) -> None:
        """This request waits no longer; without one, none of this client does."""
        for key, waiting in list(self._waiting.items()):
            waiting[:] = [(who, what) for who, what in waiting if who != client or request not in (None, what)]
            if not waiting:
                del self._waiting[key]

    def add(self, key: str, amount: int) -> tuple[int, list[tuple[int, int]]]:
        """The counter's new value, and who has been waiting for it to exist."""
        total = int(self._values.get(key, b"0")) + amount
        return total, self.set(key, b"%d" % total)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> tuple[bytes, list[tuple[int, int]]]:
        """The value afterwards (of an absent key that is not set: `expected`), and who has been waiting."""
        present = self._values.get(key)
        if present == expected or (present is None and not expected):
            return desired, self.set(key, desired)
        return (expected if present is None else present), []

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def drop(self, beginnings: tuple[str, ...], kept: tuple[str, ...] = ()) -> None:
        """Forget all keys that begin so, but for those that begin in one of the ways to be `kept`."""
        for key in [key for key in self._values if key.startswith(beginnings) and not key.startswith(kept)]:
            del self._values[key]

    def delete(self, key: str) -> bool:
        return self._values.pop(key, None) is not None
