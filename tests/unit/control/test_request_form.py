"""Arguments of requests: wrong types are refused before anything is kept."""

from __future__ import annotations

import pytest

from unisono.control.state import ControlState


@pytest.mark.parametrize(
    "words",
    [
        ("set", "key", 10**12),
        ("set", 5, b"value"),
        ("compare_set", "key", b"", 10**12),
        ("exchange", "world", "topic", [1, 2], True),
        ("exchange", "world", 7, b"mine", True),
        ("join", 0, 0, 2),
        ("join", "world", True, 2),
        ("join", "world", 1, 2, [0, "1"]),
        ("fail", "world", "CommError", "0", "because"),
        ("withdraw", "world", "topic", "long"),
        ("add", "count", 1, 2),
    ],
)
def test_wrong_types_are_rejected_immediately(words: tuple[object, ...]) -> None:
    """A number would become as many bytes, and others would get the error of a comparison."""
    state = ControlState()
    state.handle(1, 1, ("join", "world", 0, 2))
    with pytest.raises(TypeError, match=f"request '{words[0]}'"):
        state.handle(1, 2, words)
    # What was refused is nowhere.
    assert state.handle(2, 3, ("join", "world", 1, 2)) == [(2, (3, "ok", None))]
