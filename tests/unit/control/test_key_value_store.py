"""Keys of the control plane end with their group, and so do waits for them."""

from __future__ import annotations

from unisono.control.state import ControlState

OK, FAILED = "ok", "failed"


def world(size: int) -> ControlState:
    state = ControlState()
    for rank in range(size):
        state.handle(rank, 1, ("join", "world", rank, size))
    return state


def test_wait_for_a_key_ends_with_its_group() -> None:
    state = world(2)
    assert state.handle(0, 7, ("get", "x", "world")) == []
    out = state.lost(1)
    assert [reply[2][:2] for client, reply in out if client == 0 and reply[0] == 7] == [("PeerLostError", 1)]
    assert state.handle(0, 8, ("get", "x", "world"))[0][1][1] == FAILED
    assert state.handle(0, 9, ("set", "x", b"")) == [(0, (9, OK, None))]


def test_one_request_of_a_client_is_forgotten() -> None:
    state = world(2)
    for request, key in ((5, "x"), (6, "x"), (7, "y")):
        assert state.handle(0, request, ("get", key, "world")) == []
    assert state.handle(0, 8, ("forget", 5)) == [(0, (8, OK, None))]
    assert state.handle(1, 9, ("set", "x", b"1")) == [(0, (6, OK, b"1")), (1, (9, OK, None))]
    failed = state.handle(1, 10, ("fail", "world", "CommError", 1, "why"))
    assert [request for client, (request, _, _) in failed if client == 0] == [0, 7]


def test_keys_are_freed_with_their_group() -> None:
    state = world(1)
    for key in ("world/a", "torch/world/b", "world1/c", "world/1.0/d"):
        state.handle(0, 2, ("set", key, b""))
    state.handle(0, 3, ("join", "world/1.0", 0, 1))
    state.handle(0, 4, ("leave", "world"))
    assert state.handle(0, 5, ("check", ["world1/c", "world/1.0/d"]))[0][1][2] is True
    assert state.handle(0, 5, ("num_keys",))[0][1][2] == 2
    state.handle(0, 6, ("leave", "world/1.0"))
    assert state.handle(0, 7, ("num_keys",))[0][1][2] == 1
