"""Reference counting over ranks, on a model: any order of messages between different pairs of ranks, and deaths."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given
from reachable import reachable

from unisono.rpc.protocol import RELEASE
from unisono.rpc.refcount import Key, RefCounts, References

RANKS = 4


class Handle:
    """Stand-in for an RRef: counted by Python, dropped with the last reference."""

    def __init__(self, references: References, owner: int, key: Key) -> None:
        self.references, self.owner, self.key = references, owner, key
        self.lost = False

    def __del__(self) -> None:
        self.references.dropped(self.owner, self.key)


class World:
    """Some ranks, and for each ordered pair a channel that keeps its order, and no other."""

    def __init__(self, kind: Callable[..., References] = References) -> None:
        self.channels: defaultdict[tuple[int, int], deque[tuple[Any, ...]]] = defaultdict(deque)
        self.ranks = [kind(rank, self._teller(rank), object) for rank in range(RANKS)]
        self.held: list[list[Handle]] = [[] for _ in range(RANKS)]
        self.alive = set(range(RANKS))
        self.killed = False

    def _teller(self, rank: int) -> Callable[..., None]:
        def send(peer: int, kind: int, *words: int) -> None:
            self._put(rank, peer, ("protocol", kind, words))

        return send

    def _put(self, source: int, target: int, message: tuple[Any, ...]) -> None:
        if {source, target} <= self.alive:
            self.channels[source, target].append(message)

    # -- what ranks do -------------------------------------------------------------------------
    def remote(self, rank: int, owner: int) -> None:
        key = self.ranks[rank].new_key(owner)
        self.held[rank].append(Handle(self.ranks[rank], owner, key))
        self._put(rank, owner, ("make", key))

    def pass_on(self, rank: int, which: int, peer: int) -> None:
        if self.held[rank] and peer in self.alive:
            handle = self.held[rank][which % len(self.held[rank])]
            if not handle.lost:
                token, _ = self.ranks[rank].give(handle.owner, handle.key, handle, peer)
                self._put(rank, peer, ("reference", handle.owner, handle.key, token))

    def drop(self, rank: int, which: int) -> None:
        if self.held[rank]:
            del self.held[rank][which % len(self.held[rank])]

    def deliver(self, source: int, target: int) -> None:
        channel = self.channels[source, target]
        if not channel or target not in self.alive:
            return
        what, *words = channel.popleft()
        here = self.ranks[target]
        if what == "make":
            here.ledger.make(words[0], source)
        elif what == "reference":
            owner, key, token = words
            handle = Handle(here, owner, key)
            here.take(source, owner, key, token, handle)
            self.held[target].append(handle)
        elif what == "lost":
            here.lose(source)
        else:
            here.arrived(source, words[0], words[1])

    def kill(self, rank: int, kept: int) -> None:
        """It dies; the last of what it sent is lost."""
        if len(self.alive) < 3 or rank not in self.alive:
            return
        self.killed = True
        self.alive.discard(rank)
        self.held[rank].clear()
        for peer in range(RANKS):
            self.channels[peer, rank].clear()
            channel = self.channels[rank, peer]
            while len(channel) > kept:
                channel.pop()
            channel.append(("lost",))

    # -- what must hold ------------------------------------------------------------------------
    def step(self, action: tuple[Any, ...]) -> None:
        name, rank, *rest = action
        if name == "deliver" or rank in self.alive:
            getattr(self, name)(rank, *rest)
        for alive in self.alive:
            self.ranks[alive].flush()
            self.ranks[alive].freed.clear()

    def check_nothing_was_freed_too_early(self) -> None:
        """While no rank has died, every referenced object exists or is about to be created."""
        if self.killed:
            return
        coming = {(m[1], m[2]) for c in self.channels.values() for m in c if m[0] == "reference"}
        making = {(target, m[1]) for (_, target), c in self.channels.items() for m in c if m[0] == "make"}
        held = {(h.owner, h.key) for handles in self.held for h in handles}
        for owner, key in (held | coming) - making:
            assert self.ranks[owner].ledger.value(key) is not None, f"{key} of {owner} was freed under its holders"
        assert not any(h.lost for handles in self.held for h in handles)

    def settle(self, chance: random.Random) -> None:
        """Deliver all that is under way, in some order."""
        while pairs := [pair for pair, channel in self.channels.items() if channel and pair[1] in self.alive]:
            self.step(("deliver", *chance.choice(pairs)))

    def check_what_lives_is_there(self) -> None:
        for rank in self.alive:
            for handle in self.held[rank]:
                if handle.owner in self.alive and not handle.lost:
                    ledger = self.ranks[handle.owner].ledger
                    # Of an object whose making died with its creator, the place may be all there is.
                    assert ledger.value(handle.key) is not None

    def check_nothing_is_left(self) -> None:
        for rank in self.alive:
            here = self.ranks[rank]
            assert len(here.ledger) == 0, "objects are kept that nobody refers to"
            assert not here.pins, "references are kept that were passed on"
            assert not here._adding


ranks = st.integers(0, RANKS - 1)
some = st.integers(0, 9)
actions = st.one_of(
    st.tuples(st.just("remote"), ranks, ranks),
    st.tuples(st.just("pass_on"), ranks, some, ranks),
    st.tuples(st.just("pass_on"), ranks, some, ranks),
    st.tuples(st.just("drop"), ranks, some),
    st.tuples(st.just("deliver"), ranks, ranks),
    st.tuples(st.just("deliver"), ranks, ranks),
)
deaths = st.tuples(st.just("kill"), ranks, st.integers(0, 3))
stories = st.lists(actions, max_size=60)
sad_stories = st.lists(st.one_of(*[actions] * 8, deaths), max_size=60)


def live(story: list[tuple[Any, ...]], seed: int, kind: Callable[..., References] = References) -> World:
    world = World(kind)
    for action in story:
        world.step(action)
        world.check_nothing_was_freed_too_early()
    world.settle(random.Random(seed))
    world.check_nothing_was_freed_too_early()
    world.check_what_lives_is_there()
    for handles in world.held:
        handles.clear()
    world.step(("deliver", 0, 0))
    world.settle(random.Random(seed + 1))
    world.check_nothing_is_left()
    return world


@given(stories, st.integers(0, 99))
@example([("remote", 0, 0), ("drop", 0, 0)], 0)
def test_freed_with_the_last_reference(story: list[tuple[Any, ...]], seed: int) -> None:
    assert not live(story, seed).killed


@given(sad_stories, st.integers(0, 99))
@example([("remote", 0, 1), ("kill", 1, 0), ("deliver", 1, 0), ("pass_on", 0, 0, 0)], 0)
def test_dead_rank_holds_no_references(story: list[tuple[Any, ...]], seed: int) -> None:
    world = live(story, seed)
    assert world.alive


class WithoutPins(References):
    """Passes a reference on and forgets it."""

    def give(self, owner: int, key: Key, handle: Any, peer: int) -> tuple[int, Callable[[], None]]:
        token, undo = super().give(owner, key, handle, peer)
        if token:
            self._unpin(token)
        return token, undo


class ReleasesAtOnce(References):
    """Tells the passer before the owner has answered."""

    def take(self, passer: int, owner: int, key: Key, token: int, handle: Any) -> None:
        super().take(passer, owner, key, token, handle)
        for tag in list(self._adding):
            self._send(self._adding[tag][1], RELEASE, self._adding[tag][2])


class CountsRanks(References):
    """Keeps one count for each rank, however many references it has."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.given = set[tuple[Key, int]]()

    def give(self, owner: int, key: Key, handle: Any, peer: int) -> tuple[int, Callable[[], None]]:
        given = super().give(owner, key, handle, peer)
        if owner == self.rank and (key, peer) in self.given:
            self.ledger.drop(key, peer)
        self.given.add((key, peer))
        return given


class ForgetsTheDead(References):
    """Leaves a dead rank's counts as they are."""

    def lose(self, peer: int) -> list[Any]:
        return []


def any_story(chance: random.Random) -> list[tuple[Any, ...]]:
    """A story as above, without Hypothesis, which would make the first one it finds small."""
    kinds = ["remote", "pass_on", "pass_on", "drop", "deliver", "deliver", "deliver"] * 3 + ["kill"]
    numbers = {"remote": 1, "pass_on": 2, "drop": 1, "deliver": 1, "kill": 1}
    names = [chance.choice(kinds) for _ in range(60)]
    return [(name, *(chance.randrange(RANKS) for _ in range(1 + numbers[name]))) for name in names]


@pytest.mark.parametrize("wrong", [WithoutPins, ReleasesAtOnce, CountsRanks, ForgetsTheDead])
def test_protocol_mutants_are_found(wrong: Callable[..., References]) -> None:
    def is_found(seed: int) -> bool:
        try:
            live(any_story(random.Random(seed)), seed, wrong)
        except AssertionError:
            return True
        return False

    assert any(map(is_found, range(200))), f"nothing was found wrong with {wrong.__name__}"


def test_early_messages_are_kept() -> None:
    ledger = RefCounts(list)
    key = Key(1, 1)
    assert ledger.add(key, 2)
    place = ledger.value(key)
    assert ledger.make(key, 1) is place
    assert ledger.drop(key, 1) is None
    assert ledger.drop(key, 2) is place
    assert not ledger.add(key, 2), "an object that was freed has come back"


def test_freed_objects_use_no_memory() -> None:
    ledger = RefCounts(list)
    sizes = []
    for number in range(1, 1000):
        ledger.make(Key(1, number), 1)
        ledger.drop(Key(1, number), 1)
        sizes.append(reachable(ledger))
    assert len(ledger) == 0
    assert max(sizes) == sizes[0]


def test_request_of_a_dead_rank_is_dropped() -> None:
    ledger = RefCounts(list)
    ledger.add(Key(1, 1), 2)
    place = ledger.value(Key(1, 1))
    freed, orphans = ledger.lose(1)
    assert not freed
    assert orphans == [place]
    assert orphans[0] is place
