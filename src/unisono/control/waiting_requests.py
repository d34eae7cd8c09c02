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
        self._requests: dict[tuple[int, int], tuple[_Event, str | None]] = {}

    def add(self, client: int, request: int, event: _Event, group: str | None = None) -> None:
        """Let a request wait for an event. If a group is given, its failure also ends the wait."""
        self._requests[client, request] = event, group

    def count(self, event: _Event) -> int:
        """Return how many requests wait for an event."""
        return sum(event == each for each, _ in self._requests.values())

    def take(self, event: _Event, most: int | None = None) -> list[tuple[int, int]]:
        """Remove and return the requests that wait for an event: all, or at most the first `most`."""
        return self._take(lambda _, wait: wait[0] == event, most)

    def take_failed(self, group: str) -> list[tuple[int, int]]:
        """Remove and return the requests whose wait ends because a group has failed."""
        return self._take(lambda _, wait: wait[1] == group)

    def forget(self, client: int, request: int | None = None) -> None:
        """Remove a client's request; if `request` is None, remove all of the client's requests."""
        self._take(lambda who, _: who[0] == client and request in (None, who[1]))

    def _take(
        self, chosen: Callable[[tuple[int, int], tuple[_Event, str | None]], bool], most: int | None = None
    ) -> list[tuple[int, int]]:
        found = [who for who, wait in self._requests.items() if chosen(who, wait)][:most]
        for who in found:
            del self._requests[who]
        return found
