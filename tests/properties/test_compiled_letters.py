"""Letters that the compiled class finds for messages are those that the class of Python does."""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any

import torch
from compiled_kit import COMPILED, PLAIN, both
from hypothesis import example, given, settings
from hypothesis import strategies as st
from repeats_kit import HOW, changed, repeats_of


class Begun:
    def Test(self) -> bool:  # noqa: N802  # MPI's name
        return True


@both
@settings(max_examples=10 * settings.default.max_examples)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["send", "recv"]),
            st.sampled_from([0, 1, True, 300, "0"]),
            st.sampled_from([0, 3, False, 1000]),
            st.sampled_from([None, None, "busy", "another", *HOW[:8]]),
        ),
        min_size=1,
        max_size=12,
    )
)
@example([("send", 0, 0, None), ("send", 0, 0, "busy"), ("send", 0, 0, None)])
def test_letters_are_found_alike(steps: list[tuple[str, Any, Any, str | None]]) -> None:
    def played(kinds: dict[str, Any]) -> list[Any]:
        log: list[Any] = []
        repeats, base, peers, tags = repeats_of(kinds, log, None), torch.zeros(12), [0, 1, 300], [0, 3, 1000]
        tensor = base[:6]
        more = (bytearray(64), (), bytes(40), tensor, 24, None, 0, itertools.count(), 4, False, 1)

        class Letter(kinds["Carrier"]):  # type: ignore[misc]  # whichever it is
            def _ended(self, error: BaseException, under_way: list[Any], tensor: Any) -> BaseException:
                return error

        letters = [Letter(None, lambda *given: Begun(), *more) for _ in range(4)]
        kept = [("send", 0, 0), ("send", 1, 3), ("recv", 1, 0), ("recv", 0, 3)]
        for letter, (name, peer, tag) in zip(letters, kept, strict=True):
            repeats.remember(name, tensor, None, tag, peer, (bytes(24), bytes(24)), letter, (), 0)
            letter.carry(tensor, 5.0)
        busy = False
        for name, peer, tag, change in steps:
            # What is equal, and another object, is not looked for here.
            peer = next((one for one in peers if type(one) is type(peer) and one == peer), peer)
            tag = next((one for one in tags if type(one) is type(tag) and one == tag), tag)
            if change == "busy":
                busy = letters[0].take()
            elif change is not None:
                tensor = changed(tensor, base, change)
            found = repeats.letter(name, tensor, peer, tag)
            log.append(found and letters.index(found))
            for letter in [found] if found else [letters[0]] if busy else []:
                # It is free again; what becomes of the message does not matter.
                with suppress(RuntimeError):
                    letter.carry(tensor, 5.0)
            busy = False
        return log

    assert played(COMPILED) == played(PLAIN)
