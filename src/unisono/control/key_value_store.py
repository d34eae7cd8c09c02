"""Key-value store of the control plane."""

from __future__ import annotations

__all__ = ["KeyValueStore"]


class KeyValueStore(dict[str, bytes]):
    """In-memory map from keys to bytes, with the further operations of torch's stores."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which is stored as decimal text, and return its new value."""
        total = int(self.get(key, b"0")) + amount
        self[key] = b"%d" % total
        return total

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set the key if its value is `expected`, or if the key is absent and `expected` is empty.

        Return the value after the call, or `expected` if the key is still absent.
        """
        if self.get(key, b"") == expected:
            self[key] = desired
        return self.get(key, expected)

    def drop(self, prefixes: tuple[str, ...], excluded: tuple[str, ...] = ()) -> None:
        """Delete all keys with one of these prefixes, except those with a prefix in `excluded`."""
        for key in [key for key in self if key.startswith(prefixes) and not key.startswith(excluded)]:
            del self[key]
