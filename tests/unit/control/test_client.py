"""The control plane's store and exchanges: one behaviour, behind sockets and between threads."""

from __future__ import annotations

import threading

import pytest
from control_helpers import SOON, Make, everywhere, world
from waiting import run_concurrently

from unisono.control import LocalHub
from unisono.core.group import Group
from unisono.errors import CommError, CommTimeoutError


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
    got = run_concurrently(
        lambda: one.get("late", SOON), lambda: two.get("late", SOON), lambda: make().set("late", b"!")
    )
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

    assert run_concurrently(*[lambda n=n: work(n) for n in range(6)]) == list(range(6))
    assert control.get("count", SOON) == b"300"


def test_share(make: Make) -> None:
    control = make()
    objects = run_concurrently(*[lambda: control.share("lock", threading.Lock) for _ in range(4)])
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
        assert (
            everywhere(controls, groups, lambda c, g: c.exchange_unless_equal(g, "same", ("sum", 4), SOON))
            == [None] * 3
        )
        other = everywhere(controls, groups, lambda c, g: c.exchange_unless_equal(g, "other", g.rank == 1, SOON))
        assert other == [[False, True, False]] * 3


def test_groups_do_not_mix(make: Make) -> None:
    controls, groups, _ = world(make, 2)
    others = [group.child("part", (1, 0)) for group in groups]
    for control, group in zip(controls, others, strict=True):
        control.join(group)
    names = everywhere(controls * 2, groups + others, lambda c, g: c.exchange(g, "x", g.name, SOON))
    assert names == [["world"] * 2] * 2 + [["world/part"] * 2] * 2


def test_unserializable_values_are_rejected_locally(make: Make) -> None:
    controls, groups, told = world(make, 2)
    with pytest.raises(TypeError, match="value is the function"):
        controls[0].exchange(groups[0], "x", lambda: 0, SOON)
    assert everywhere(controls, groups, lambda c, g: c.exchange_unless_equal(g, "x", 1, SOON)) == [None, None]
    assert all(heard.nothing() for heard in told)


def test_exchange_requires_membership(make: Make) -> None:
    with pytest.raises(CommError, match="has not joined"):
        make().exchange(Group.world(0, 2), "x", 1, SOON)
