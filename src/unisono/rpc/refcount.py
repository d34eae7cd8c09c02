"""Who refers to what: how an owner knows when nobody needs an object any more.

Reference listing, after Birrell, Evers, Nelson, Owicki and Wobber, *Distributed Garbage Collection for Network
Objects* (1993). The owner counts, for each rank, the references that rank holds. Messages of one rank to another
arrive in order; of messages between different pairs of ranks nothing is known. So a rule is needed when A passes
a reference of an object of O on to B, and then drops its own: B's `ADD` and A's `DROP` race to O.

- The owner passes a reference to B: it counts one for B before it sends.
- A, not the owner, passes one to B: it *pins* its own, so that it cannot be dropped. B tells the owner (`ADD`), the
  owner answers (`ADD_ACK`), and only then does B tell A to `RELEASE` the pin. If B is the owner, it counts and
  releases.
- Who drops a reference tells the owner (`DROP`). When all counts are 0, the object is freed.
- `remote` counts one for its caller when the owner gets the call. Somebody else's `ADD` may come before that: it
  finds no object yet, and a place is kept for it. Objects are numbered for each pair of creator and owner, so that an
  owner can tell what is yet to come from what was freed long ago, whose `ADD_ACK` says so.
- A rank that dies holds nothing any more: its counts vanish, and what was pinned for it is released.

Every living reference is either counted, or pinned by another one of which the same is true: so nothing that a
living rank refers to is freed, unless the rank that passed it on died before the owner heard of it.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from unisono.rpc.protocol import ADD, ADD_ACK, DROP, RELEASE

__all__ = ["Handle", "Key", "RefCounts", "References", "Tell"]

Tell = Callable[..., None]
"""Called with a rank, the kind of a message and its numbers."""


class Key(NamedTuple):
    """What an object is known by at its owner: the rank that asked for it, and its number among those."""

    creator: int
    number: int


class Handle(Protocol):
    """A reference. `gone` is set when the owner does not know the object."""

    gone: bool


class _Entry:
    """One object, or the place for it.

    Attributes:
        counts: How many references each rank holds.
        value: The owner's business.
    """

    __slots__ = ("counts", "made", "value")

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.made = False
        self.value: Any = None


class _Numbers:
    """Numbers that have been seen; nearly all in a row, so few are kept."""

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
    """The objects of one owner, and who refers to them. Not safe for threads.

    Args:
        blank: Makes what stands for a value that is yet to come.
    """

    def __init__(self, blank: Callable[[], Any] = lambda: None) -> None:
        self._blank = blank
        self._entries: dict[Key, _Entry] = {}
        self._made: dict[int, _Numbers] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def make(self, key: Key, holder: int) -> Any:
        """The object begins to be, with one reference; its value."""
        self._made.setdefault(key.creator, _Numbers()).add(key.number)
        entry = self._place(key)
        entry.made = True
        entry.counts[holder] += 1
        return entry.value

    def add(self, key: Key, holder: int) -> bool:
        """One more reference; False if the object is no more."""
        if key not in self._entries and key.number in self._made.get(key.creator, ()):
            return False
        self._place(key).counts[holder] += 1
        return True

    def drop(self, key: Key, holder: int) -> Any:
        """One reference less; the value of what is freed by that, else None."""
        entry = self._entries.get(key)
        if entry is None or not entry.counts[holder]:
            return None
        entry.counts[holder] -= 1
        return self._free(key, entry)

    def lose(self, holder: int) -> tuple[list[Any], list[Any]]:
        """A rank is gone, and its references with it: values that are freed, and those that will never come."""
        freed, orphans = [], []
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
        """Of an object that somebody refers to; None if there is none."""
        entry = self._entries.get(key)
        return None if entry is None else entry.value

    def _place(self, key: Key) -> _Entry:
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry()
            entry.value = self._blank()
        return entry

    def _free(self, key: Key, entry: _Entry) -> Any:
        if entry.counts.total():
            return None
        del self._entries[key]
        return entry.value


class References:
    """One rank's part in the protocol above: as an owner, as a holder, as one who passes on.

    Args:
        rank: This rank.
        tell: Sends a message to another rank, or to this one. To one that is gone: does nothing.
        blank: As of `RefCounts`.

    Attributes:
        freed: Values that nobody refers to, for the owner to let go where their finalizers do no harm.
    """

    def __init__(self, rank: int, tell: Tell, blank: Callable[[], Any] = lambda: None) -> None:
        self.rank, self._tell = rank, tell
        self.ledger = RefCounts(blank)
        self.lock = threading.Lock()
        self._tokens = itertools.count(1)
        self._numbers: dict[int, Any] = {}
        self._unused: set[tuple[int, Key]] = set()
        self._pins: dict[int, tuple[int, Handle]] = {}
        self._adding: dict[int, tuple[int, int, int, Handle]] = {}
        self._dropped: deque[tuple[int, Key]] = deque()
        self.freed: deque[Any] = deque()

    # -- holders -------------------------------------------------------------------------------
    def new_key(self, owner: int) -> Key:
        """For an object that this rank asks an owner to make."""
        with self.lock:
            for found in self._unused:
                if found[0] == owner:
                    self._unused.remove(found)
                    return found[1]
            numbers = self._numbers.setdefault(owner, itertools.count(1))
            return Key(self.rank, next(numbers))

    def unused(self, owner: int, key: Key) -> None:
        """The owner was not asked for it after all, nor will anybody speak of it: the next object gets its number."""
        with self.lock:
            self._unused.add((owner, key))

    def give(self, owner: int, key: Key, handle: Handle, peer: int) -> tuple[int, Callable[[], None]]:
        """Pass a reference on: the token that goes along, and how to take that back if nothing is sent."""
        if owner == self.rank:
            with self.lock:
                self.ledger.add(key, peer)
            return 0, lambda: self.dropped(owner, key, peer)
        token = next(self._tokens)
        with self.lock:
            self._pins[token] = peer, handle
        return token, lambda: self._unpin(token)

    def take(self, passer: int, owner: int, key: Key, token: int, handle: Handle) -> None:
        """A reference has come, with this token."""
        if owner == self.rank:
            if token:
                with self.lock:
                    handle.gone = not self.ledger.add(key, self.rank)
                self._tell(passer, RELEASE, token)
        elif passer != owner:
            tag = next(self._tokens)
            with self.lock:
                self._adding[tag] = owner, passer, token, handle
            self._tell(owner, ADD, *key, tag)

    def dropped(self, owner: int, key: Key, holder: int | None = None) -> None:
        """A reference is no more. May be called by a finalizer: takes no lock, `flush` does the rest."""
        if holder is None or holder == self.rank:
            self._dropped.append((owner, key))
        else:
            with self.lock:
                self.ledger.drop(key, holder)

    @property
    def waiting(self) -> bool:
        """Whether there is something to `flush`."""
        return bool(self._dropped)

    def flush(self) -> None:
        """Tell owners of what was dropped."""
        while self._dropped:
            owner, key = self._dropped.popleft()
            if owner == self.rank:
                self._drop(key, self.rank)
            else:
                self._tell(owner, DROP, *key)

    @property
    def pins(self) -> int:
        """How many references are kept for those who got them from this rank."""
        return len(self._pins)

    # -- what others say -----------------------------------------------------------------------
    def arrived(self, peer: int, kind: int, words: tuple[int, ...]) -> None:
        """A message of the protocol has come from a rank. Those of one rank: one after another, in order."""
        if kind == ADD:
            with self.lock:
                known = self.ledger.add(Key(*words[:2]), peer)
            self._tell(peer, ADD_ACK, words[2], int(known))
        elif kind == ADD_ACK:
            self._added(words[0], bool(words[1]))
        elif kind == DROP:
            self._drop(Key(*words), peer)
        elif kind == RELEASE:
            self._unpin(words[0])

    def lose(self, peer: int) -> list[Any]:
        """A rank is gone; the values that will never come because of that."""
        with self.lock:
            freed, orphans = self.ledger.lose(peer)
            pins = [self._pins.pop(token) for token, (holder, _) in list(self._pins.items()) if holder == peer]
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
            handle.gone = handle.gone or not known
            self._tell(passer, RELEASE, token)

    def _drop(self, key: Key, holder: int) -> None:
        with self.lock:
            freed = self.ledger.drop(key, holder)
        if freed is not None:
            self.freed.append(freed)

    def _unpin(self, token: int) -> None:
        with self.lock:
            self.freed.append(self._pins.pop(token, None))
