"""When a deputy takes over from the receiving thread."""

from __future__ import annotations

import threading

from unisono.rpc.turn import Turn

LIMIT_S = 20.0


def watched(turn: Turn) -> tuple[threading.Thread, list[bool], threading.Event]:
    """Start a deputy; return its thread, what it returns, and an event that it sets then."""
    results = list[bool]()
    decided = threading.Event()

    def stand_by() -> None:
        results.append(turn.overruns())
        decided.set()

    thread = threading.Thread(target=stand_by)
    thread.start()
    return thread, results, decided


def test_deputy_takes_over_from_a_function_that_does_not_end() -> None:
    turn = Turn()
    thread, results, decided = watched(turn)
    # The function ends only once the deputy has taken over.
    assert not turn.run(lambda: decided.wait(LIMIT_S))
    thread.join(LIMIT_S)
    assert results == [True]
    turn.close()


def test_deputy_ends_with_the_turn() -> None:
    for runs in (0, 1, 1000):
        turn = Turn()
        thread, results, _ = watched(turn)
        # On a busy machine, even these functions may take so long that the deputy takes over.
        stayed = all(turn.run(lambda: None) for _ in range(runs))
        turn.close()
        thread.join(LIMIT_S)
        assert results == [not stayed]


def test_error_in_a_function_does_not_end_the_turn() -> None:
    turn = Turn()

    def fail() -> None:
        raise SystemExit

    assert turn.run(fail)
    assert turn.run(lambda: None)
    turn.close()
