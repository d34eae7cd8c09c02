"""Distributed reference counting, through which an owner learns when an object is no longer referenced.

The algorithm is reference listing, after Birrell, Evers, Nelson, Owicki and Wobber, *Distributed Garbage Collection for
Network Objects* (1993). The owner counts the references that each rank holds. Messages from one rank to another arrive
in order, but messages between different pairs of ranks are unordered. Therefore, if rank A passes a reference to B and
then drops its own reference, A's `DROP` may reach the owner before B's `ADD`. The following rules keep the object
alive.

- When the owner passes a reference to B, it counts a reference for B before it sends the message.
- When A, which is not the owner, passes a reference to B, A *pins* its own reference, so that it cannot be dropped. B
  notifies the owner (`ADD`), the owner answers (`ADD_ACK`), and only then does B send A a `RELEASE` of the pin. If B is
  the owner, B counts the reference and sends the release.
- A rank that drops a reference notifies the owner (`DROP`). When all counts are 0, the object is freed.
- When the owner receives a `remote` call, it counts one reference for the caller. Another rank's `ADD` may arrive
  earlier, when the object does not exist yet; the owner then reserves an entry for the object. Objects are numbered per
  pair of creator and owner, so that an owner can tell whether an unknown object is still to be created or has been
  freed. The owner reports freed objects in its `ADD_ACK`.
- When a rank dies, its counts are dropped, and references pinned for it are released.

Every live reference is either counted, or covered by a pinned reference that is itself counted or covered. Therefore,
an object is not freed while a living rank refers to it, unless the rank that passed on this reference died before the
owner was notified.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from unisono.rpc.protocol import ADD, ADD_ACK, DROP, RELEASE

__all__ = ["CountedReference", "Key", "RefCounts", "References", "Send"]

Send = Callable[..., None]
"""Function called with a rank, the kind of a message, and the message's numbers."""


class Key(NamedTuple):
    """Identity of an object on its owner: the rank that requested the object, and a number assigned by that rank."""

    creator: int
    number: int


class CountedReference(Protocol):
    """A reference. `lost` is set when the owner does not know the object."""

    lost: bool


@dataclass(slots=True)
class _Entry:
    """Entry of an object that exists or is still to be created.

    Attributes:
        value: The object, opaque to this module.
        made: Whether the object exists.
        counts: Number of references held by each rank.
    """

    value: Any
    made: bool = False
    counts: Counter[int] = field(default_factory=Counter)


class _Numbers:
    """Set of numbers already seen. Nearly all numbers are consecutive, so only a few must be stored."""

    __slots__ = ("_beyond", "_next")

    def __init__(self) -> None:
        self._next = 1
        self._beyond: set[int] = set()

    def add(self, number: int) -> None:
        self._beyond.add(number)
        while self._next in self._beyond:
            self._beyond.remove(self._next)
            self._next += 1

    def __contains__(self, number: int) -> bool:
        return number < self._next or number in self._beyond


class RefCounts:
    """One owner's objects, with the references held by each rank. Not thread-safe.

    Args:
        blank: Function that creates a placeholder for a value that does not exist yet.
    """

    def __init__(self, blank: Callable[[], Any] = lambda: None) -> None:
        self._blank = blank
        self._entries: dict[Key, _Entry] = {}
        self._made: dict[int, _Numbers] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def make(self, key: Key, holder: int) -> Any:
        """Register a created object with one reference; return its value."""
        self._made.setdefault(key.creator, _Numbers()).add(key.number)
        entry = self._entry(key)
        entry.made = True
        entry.counts[holder] += 1
        return entry.value

    def is_made(self, key: Key) -> bool:
        """Return whether the object has been created; it may have been freed since."""
        return key.number in self._made.get(key.creator, ())

    def add(self, key: Key, holder: int) -> bool:
        """Add a reference; return False if the object has been freed."""
        if key not in self._entries and self.is_made(key):
            return False
        self._entry(key).counts[holder] += 1
        return True

    def drop(self, key: Key, holder: int) -> Any:
        """Drop a reference; return the value if that frees the object, else None."""
        entry = self._entries.get(key)
        if entry is None or not entry.counts[holder]:
            return None
        entry.counts[holder] -= 1
        return self._free(key, entry)

    def lose(self, holder: int) -> tuple[list[Any], list[Any]]:
        """Drop a lost rank's references. Return the freed values, and placeholders of values that will never exist."""
        freed = []
        orphans = []
        for key, entry in list(self._entries.items()):
            if entry.counts.pop(holder, 0):
                value = self._free(key, entry)
                if value is not None:
                    freed.append(value)
                    continue
            if key.creator == holder and not entry.made:
                orphans.append(entry.value)
        return freed, orphans

    def value(self, key: Key) -> Any:
        """Return the value of a referenced object; None if the object is not referenced."""
        entry = self._entries.get(key)
        return None if entry is None else entry.value

    def _entry(self, key: Key) -> _Entry:
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(self._blank())
        return entry

    def _free(self, key: Key, entry: _Entry) -> Any:
        if entry.counts.total():
            return None
        del self._entries[key]
        return entry.value


class References:
    """One rank's part in the reference-counting protocol: as an owner, as a holder, or when passing references on.

    Args:
        rank: This rank.
        send: Function that sends a message to any rank, including this one, and ignores ranks that are gone.
        blank: As in `RefCounts`.

    Attributes:
        ledger: Objects that this rank owns.
        lock: Lock that guards `ledger`, `pins`, and the tables of keys and of references being added.
        pins: Pinned references, which were passed to another rank and not yet released: that rank and the reference, by
            token.
        freed: Unreferenced values, to be released when their finalizers can run safely.
    """

    def __init__(self, rank: int, send: Send, blank: Callable[[], Any] = lambda: None) -> None:
        self.rank = rank
        self._send = send
        self.ledger: RefCounts = RefCounts(blank)
        self.lock: threading.Lock = threading.Lock()
        self._tokens = itertools.count(1)
        self._numbers: dict[int, Any] = {}
        self._unused: set[tuple[int, Key]] = set()
        self.pins: dict[int, tuple[int, CountedReference]] = {}
        self._adding: dict[int, tuple[int, int, int, CountedReference]] = {}
        self._dropped: deque[tuple[int, Key]] = deque()
        self._gone: set[int] = set()
        self.freed: deque[Any] = deque()

    # -- holders -------------------------------------------------------------------------------
    def new_key(self, owner: int) -> Key:
        """Return a key for an object that this rank requests from an owner."""
        with self.lock:
            for found in self._unused:
                if found[0] == owner:
                    self._unused.remove(found)
                    return found[1]
            numbers = self._numbers.setdefault(owner, itertools.count(1))
            return Key(self.rank, next(numbers))

    def unused(self, owner: int, key: Key) -> None:
        """Recycle a key that was not sent to any rank: the next object requested from this owner gets the key."""
        with self.lock:
            self._unused.add((owner, key))

    def give(self, owner: int, key: Key, handle: CountedReference, peer: int) -> tuple[int, Callable[[], None]]:
        """Prepare to pass a reference on: count it if this rank is the owner, and pin it otherwise.

        Returns the token to send with the reference, and a function that undoes the preparation if nothing is sent.
        """
        if owner == self.rank:
            with self.lock:
                self.ledger.add(key, peer)
            return 0, lambda: self.dropped(owner, key, peer)
        token = next(self._tokens)
        with self.lock:
            self.pins[token] = peer, handle
        return token, lambda: self._unpin(token)

    def take(self, passer: int, owner: int, key: Key, token: int, handle: CountedReference) -> None:
        """Accept a received reference, with its token."""
        if owner == self.rank:
            if token:
                with self.lock:
                    handle.lost = not self.ledger.add(key, self.rank)
                self._send(passer, RELEASE, token)
        elif passer != owner:
            tag = next(self._tokens)
            with self.lock:
                self._adding[tag] = owner, passer, token, handle
            if owner in self._gone:
                self._added(tag, known=False)
            else:
                self._send(owner, ADD, *key, tag)

    def dropped(self, owner: int, key: Key, holder: int | None = None) -> None:
        """Queue a dropped reference. May be called by a finalizer, so it takes no lock; `flush` notifies the owner."""
        if holder is None or holder == self.rank:
            self._dropped.append((owner, key))
        else:
            with self.lock:
                self.ledger.drop(key, holder)

    @property
    def waiting(self) -> bool:
        """Return whether dropped references wait for `flush`."""
        return bool(self._dropped)

    def flush(self) -> None:
        """Notify owners that this rank has dropped references."""
        while self._dropped:
            owner, key = self._dropped.popleft()
            with self.lock:
                is_made = owner == self.rank and self.ledger.is_made(key)
            if is_made:
                self._drop(key, self.rank)
            else:
                # Send the `DROP` even if this rank is the owner: its own request to create the object may still be in
                # flight, and the `DROP` must arrive after it.
                self._send(owner, DROP, *key)

    # -- messages from other ranks -------------------------------------------------------------
    def arrived(self, peer: int, kind: int, words: tuple[int, ...]) -> None:
        """Handle a protocol message. Messages from one rank must be handled one at a time, in order."""
        if kind == ADD:
            with self.lock:
                known = self.ledger.add(Key(*words[:2]), peer)
            self._send(peer, ADD_ACK, words[2], int(known))
        elif kind == ADD_ACK:
            self._added(words[0], bool(words[1]))
        elif kind == DROP:
            self._drop(Key(*words), peer)
        elif kind == RELEASE:
            self._unpin(words[0])

    def lose(self, peer: int) -> list[Any]:
        """Handle a lost rank; return the values that will never be created because of the loss."""
        with self.lock:
            self._gone.add(peer)
            freed, orphans = self.ledger.lose(peer)
            pins = [self.pins.pop(token) for token, (holder, _) in list(self.pins.items()) if holder == peer]
            waiting = [tag for tag, (owner, *_) in self._adding.items() if owner == peer]
        for tag in waiting:
            self._added(tag, known=False)
        self.freed.extend((*freed, *pins))
        return orphans

    def _added(self, tag: int, known: bool) -> None:
        with self.lock:
            found = self._adding.pop(tag, None)
        if found is not None:
            _, passer, token, handle = found
            handle.lost = handle.lost or not known
            self._send(passer, RELEASE, token)

    def _drop(self, key: Key, holder: int) -> None:
        with self.lock:
            freed = self.ledger.drop(key, holder)
        if freed is not None:
            self.freed.append(freed)

    def _unpin(self, token: int) -> None:
        with self.lock:
            self.freed.append(self.pins.pop(token, None))
