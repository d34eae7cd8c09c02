"""The control plane's promises, within a process and over sockets."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from unisono.control import Cause, LocalHub, error_of
from unisono.control.client import SocketControl
from unisono.control.requester import Requester
from unisono.control.server import Server
from unisono.errors import ClosedError, CommError, CommTimeoutError, MismatchError, PeerLostError
from unisono.group import Group

SECRET = b"of the tests"
SOON = 10.0

Make = Callable[[], Requester]


@pytest.fixture(params=["local", "socket"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """One more rank's handle; all of a test lead to the same control plane."""
    made: list[Requester] = []
    hub, server = (LocalHub(), None) if request.param == "local" else (None, Server(SECRET))

    def one() -> Requester:
        made.append(SocketControl(server.address, SECRET, SOON) if server is not None else hub.control())
        return made[-1]

    yield one
    for control in made:
        control.close()
    if server is not None:
        server.close()
        assert not server._thread.is_alive()


def die(control: Requester) -> None:
    """End a handle as a killed process does."""
    if isinstance(control, SocketControl):
        control._line.hang_up()
    else:
        control.lose()  # type: ignore[attr-defined]


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What each call returned or raised, all of them at the same time."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(SOON) for future in [pool.submit(outcome, call) for call in calls]]


class Told:
    """A callback that keeps the causes it is told."""

    def __init__(self) -> None:
        self._causes: queue.SimpleQueue[Cause] = queue.SimpleQueue()

    def __call__(self, cause: Cause) -> None:
        self._causes.put(cause)

    def only(self) -> Cause:
        """The one cause that comes."""
        cause = self._causes.get(timeout=SOON)
        assert self._causes.empty()
        return cause

    def nothing(self) -> bool:
        return self._causes.empty()


def world(make: Make, size: int) -> tuple[list[Requester], list[Group], list[Told]]:
    """Handles of all ranks, joined, and the failures that each is told."""
    controls, groups = [make() for _ in range(size)], [Group.world(rank, size) for rank in range(size)]
    told = [Told() for _ in range(size)]
    for control, group, heard in zip(controls, groups, told, strict=True):
        control.join(group, heard)
    return controls, groups, told


def everywhere(controls: list[Requester], groups: list[Group], act: Callable[[Requester, Group], Any]) -> list[Any]:
    """What each rank returned or raised."""
    return together(*[partial(act, control, group) for control, group in zip(controls, groups, strict=True)])


# -- the store -------------------------------------------------------------------------------------
def test_store(make: Make) -> None:
    one, two = make(), make()
    one.set("a", b"1")
    assert two.get("a", SOON) == b"1"
    assert (two.add("a", 4), one.add("new", -2), one.get("new", SOON)) == (5, -2, b"-2")
    assert one.compare_set("b", b"", b"x") == b"x"
    assert two.compare_set("b", b"y", b"z") == b"x"
    assert two.compare_set("b", b"x", b"z") == b"z"
    assert two.compare_set("absent", b"q", b"z") == b"q"
    assert (one.check(["a", "b"]), one.check(["a", "c"]), one.num_keys()) == (True, False, 3)
    assert (one.delete("a"), two.delete("a"), two.check(["a"])) == (True, False, False)
    with pytest.raises(CommError, match="'b' holds no number"):
        one.add("b", 1)


def test_get_waits_until_set(make: Make) -> None:
    one, two = make(), make()
    got = together(lambda: one.get("late", SOON), lambda: two.get("late", SOON), lambda: make().set("late", b"!"))
    assert got == [b"!", b"!", None]
    with pytest.raises(CommTimeoutError, match=r"waited 0.0 s for the key 'never'"):
        one.get("never", 0.01)
    assert one.get("late", 0) == b"!"


def test_many_threads_on_one_handle(make: Make) -> None:
    control = make()

    def work(number: int) -> int:
        for _ in range(50):
            control.add("count", 1)
        control.set(f"done {number}", b"")
        control.get(f"done {(number + 1) % 6}", SOON)
        return number

    assert together(*[lambda n=n: work(n) for n in range(6)]) == list(range(6))
    assert control.get("count", SOON) == b"300"


def test_share(make: Make) -> None:
    control = make()
    objects = together(*[lambda: control.share("lock", threading.Lock) for _ in range(4)])
    assert len(set(map(id, objects))) == 1


def test_local_ranks_share() -> None:
    hub = LocalHub()
    assert hub.control().share("x", object) is hub.control().share("x", object)


# -- exchanges -------------------------------------------------------------------------------------
def test_exchange_and_agree(make: Make) -> None:
    controls, groups, _ = world(make, 3)
    for _ in range(3):
        given = everywhere(controls, groups, lambda c, g: c.exchange(g, "all", {"rank": g.rank}, SOON))
        assert given == [[{"rank": rank} for rank in range(3)]] * 3
        assert everywhere(controls, groups, lambda c, g: c.agree(g, "same", ("sum", 4), SOON)) == [None] * 3
        other = everywhere(controls, groups, lambda c, g: c.agree(g, "other", g.rank == 1, SOON))
        assert other == [[False, True, False]] * 3


def test_groups_do_not_mix(make: Make) -> None:
    controls, groups, _ = world(make, 2)
    others = [group.child("part", (1, 0)) for group in groups]
    for control, group in zip(controls, others, strict=True):
        control.join(group, lambda cause: None)
    names = everywhere(controls * 2, groups + others, lambda c, g: c.exchange(g, "x", g.name, SOON))
    assert names == [["world"] * 2] * 2 + [["world/part"] * 2] * 2


def test_values_that_cannot_travel_are_refused_at_home(make: Make) -> None:
    controls, groups, told = world(make, 2)
    with pytest.raises(TypeError, match="value is the function"):
        controls[0].exchange(groups[0], "x", lambda: 0, SOON)
    assert everywhere(controls, groups, lambda c, g: c.agree(g, "x", 1, SOON)) == [None, None]
    assert all(heard.nothing() for heard in told)


def test_who_has_not_joined_cannot_exchange(make: Make) -> None:
    with pytest.raises(CommError, match="has not joined"):
        make().exchange(Group.world(0, 2), "x", 1, SOON)


# -- failures --------------------------------------------------------------------------------------
def test_timeout_names_who_is_missing_to_all(make: Make) -> None:
    controls, groups, told = world(make, 4)
    waiting = [
        lambda: controls[0].exchange(groups[0], "all_reduce #3", 1, 0.2),
        lambda: controls[2].exchange(groups[2], "all_reduce #3", 1, SOON),
        lambda: controls[1].cause(groups[1], SOON),
    ]
    first, second, cause = together(*waiting)
    words = (
        "waited 0.2 s in all_reduce #3 for rank 1 (and 3), which have not come. "
        "Are they alive, or did they skip a call?"
    )
    assert cause == Cause("CommTimeoutError", 1, words)
    assert (type(first), str(first)) == (CommTimeoutError, f"rank 0 of 4: {words}")
    assert (type(second), str(second)) == (CommTimeoutError, f"rank 2 of 4: {words}")
    late = together(lambda: controls[3].exchange(groups[3], "all_reduce #3", 1, SOON))[0]
    assert isinstance(late, CommTimeoutError)
    assert everywhere(controls, groups, lambda c, g: c.cause(g, SOON)) == [cause] * 4
    assert [heard.only() for heard in told] == [cause] * 4


def test_a_death_is_told_to_who_waits_and_who_does_not(make: Make) -> None:
    controls, groups, told = world(make, 3)
    waiting = together(lambda: controls[0].exchange(groups[0], "x", 1, SOON), lambda: die(controls[1]))[0]
    assert isinstance(waiting, PeerLostError)
    assert str(waiting) == "rank 0 of 3: rank 1 was lost: its process ended without closing the communicator"
    assert (waiting.peer, waiting.rank) == (1, 0)
    cause = controls[2].cause(groups[2], SOON)
    assert cause is not None
    assert (cause.kind, cause.rank) == ("PeerLostError", 1)
    assert told[2].only() == cause


def test_the_first_cause_stays(make: Make) -> None:
    controls, groups, told = world(make, 2)
    first = Cause("MismatchError", 1, "rank 1 differs")
    assert controls[0].cause(groups[0]) is None
    assert controls[1].fail(groups[1], first) == first
    assert controls[0].cause(groups[0], SOON) == first
    assert controls[0].fail(groups[0], Cause("AbortedError", 0, "later")) == first
    die(controls[1])
    with pytest.raises(MismatchError, match="rank 0 of 2: rank 1 differs"):
        controls[0].agree(groups[0], "x", 1, SOON)
    assert told[0].only() == first


def test_who_joins_late_is_told(make: Make) -> None:
    early, late, heard = make(), make(), Told()
    early.join(Group.world(0, 2), lambda cause: None)
    cause = early.fail(Group.world(0, 2), Cause("AbortedError", 0, "enough"))
    late.join(Group.world(1, 2), heard)
    assert late.cause(Group.world(1, 2), SOON) == cause
    assert heard.only() == cause
    assert make().cause(Group.world(0, 2)) == cause


def test_to_leave_in_peace(make: Make) -> None:
    controls, groups, told = world(make, 3)
    left, waiting = together(lambda: controls[1].leave(groups[1]), lambda: controls[0].agree(groups[0], "x", 1, SOON))
    assert left is None
    assert isinstance(waiting, PeerLostError)
    assert "rank 1 has left (it closed the communicator)" in str(waiting)
    with pytest.raises(PeerLostError, match="rank 1 has left"):
        controls[2].exchange(groups[2], "y", 1, SOON)
    assert all(heard.nothing() for heard in told)
    controls[1].leave(groups[1])


@pytest.mark.parametrize(
    ("rank", "size", "words"), [(0, 2, "two processes claim to be rank 0"), (1, 3, "has 3 ranks, others say 2")]
)
def test_contradictions_end_a_group_that_is_gathering(make: Make, rank: int, size: int, words: str) -> None:
    first, second = make(), make()
    first.join(Group.world(0, 2), lambda cause: None)
    with pytest.raises(MismatchError, match=words):
        second.join(Group.world(rank, size), lambda cause: None)
    with pytest.raises(MismatchError, match=words):
        first.exchange(Group.world(0, 2), "x", 1, SOON)


def test_contradictions_do_not_harm_a_group_that_is_complete(make: Make) -> None:
    controls, groups, told = world(make, 2)
    with pytest.raises(MismatchError, match="two processes claim to be rank 1"):
        make().join(Group.world(1, 2), lambda cause: None)
    assert everywhere(controls, groups, lambda c, g: c.agree(g, "x", 1, SOON)) == [None, None]
    assert all(heard.nothing() for heard in told)


def test_after_close(make: Make) -> None:
    controls, groups, _ = world(make, 2)
    controls[0].close()
    controls[0].close()
    controls[0].leave(groups[0])
    with pytest.raises(ClosedError, match="closed"):
        controls[0].get("x", SOON)
    with pytest.raises(PeerLostError, match="rank 0 has left"):
        controls[1].agree(groups[1], "x", 1, SOON)


def test_close_ends_a_wait(make: Make) -> None:
    control = make()
    started = threading.Event()

    def wait() -> bytes:
        started.set()
        return control.get("never", SOON)

    def close() -> None:
        started.wait(SOON)
        control.close()

    assert isinstance(together(wait, close)[0], ClosedError)


def test_give_up_tells_why(make: Make) -> None:
    controls, groups, _ = world(make, 2)
    controls[1].give_up(ValueError("no data"))
    with pytest.raises(PeerLostError, match="rank 0 of 2: rank 1 failed: ValueError: no data"):
        controls[0].agree(groups[0], "x", 1, SOON)


def test_error_of() -> None:
    assert type(error_of(Cause("ClosedError", None, "x"))) is ClosedError
    assert type(error_of(Cause("ValueError", None, "x"))) is CommError
    assert type(error_of(Cause("annotations", None, "x"))) is CommError
