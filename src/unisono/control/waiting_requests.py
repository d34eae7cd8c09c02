"""Requests to the control plane that wait for an event."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["WaitingRequests"]

_Event = tuple[str, str]


class WaitingRequests:
    """Requests that are answered once something has happened, such as a key that is set, or a group that has ended.

    A request is identified by its client and its number. An event is a kind, and the name of a key or a group.
    """

    def __init__(self) -> None:
        # By event, because every change of a key looks for the requests that wait for it.
        self._requests: dict[_Event, dict[tuple[int, int], str | None]] = {}

    def add(self, client: int, request: int, event: _Event, group: str | None = None) -> None:
        """Let a request wait for an event. If a group is given, its failure also ends the wait."""
        self._requests.setdefault(event, {})[client, request] = group

    def count(self, event: _Event) -> int:
        """Return how many requests wait for an event."""
        return len(self._requests.get(event, ()))

    def take(self, event: _Event, most: int | None = None) -> list[tuple[int, int]]:
        """Remove and return the requests that wait for an event: all, or at most the first `most`."""
        return self._take([event], lambda _who, _group: True, most)

    def take_failed(self, group: str) -> list[tuple[int, int]]:
        """Remove and return the requests whose wait ends because a group has failed."""
        return self._take(list(self._requests), lambda _who, given: given == group)

    def forget(self, client: int, request: int | None = None) -> None:
        """Remove a client's request; if `request` is None, remove all of the client's requests."""
        self._take(list(self._requests), lambda who, _group: who[0] == client and request in (None, who[1]))

    def _take(
        self, events: list[_Event], chosen: Callable[[tuple[int, int], str | None], bool], most: int | None = None
    ) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for event in events:
            waiting = self._requests.get(event, {})
            taken = [who for who, group in waiting.items() if chosen(who, group)][:most]
            for who in taken:
                del waiting[who]
            if not waiting:
                self._requests.pop(event, None)
            found += taken
        return found
