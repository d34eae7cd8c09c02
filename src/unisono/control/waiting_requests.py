"""Requests to the control plane that wait for an event."""

from __future__ import annotations

__all__ = ["WaitingRequests"]

_Event = tuple[str, str]
_Who = tuple[int, int]


class WaitingRequests:
    """Requests that are answered once something has happened, such as a key that is set, or a group that has ended.

    A request is identified by its client and its number, and waits for one event. An event is a kind and a name:

    - ("key", key): the key is set;
    - ("left", group): all ranks have left the group, or it has failed;
    - ("stop", group): the group's stop boundary is known;
    - ("admission", ""): a group that grows admits the client.
    """

    def __init__(self) -> None:
        self._waits: dict[_Who, tuple[_Event, str | None]] = {}
        # Indexes, because every change of a key looks for the requests that wait for it, and every failure of a group
        # for those that it ends. Dicts without values keep the order in which the requests were added.
        self._by_event: dict[_Event, dict[_Who, None]] = {}
        self._by_group: dict[str, dict[_Who, None]] = {}

    def add(self, client: int, request: int, event: _Event, group: str | None = None) -> None:
        """Let a request wait for an event. If a group is given, its failure also ends the wait."""
        who = client, request
        if who in self._waits:
            # The client has used a number twice.
            self._remove(who)
        self._waits[who] = event, group
        self._by_event.setdefault(event, {})[who] = None
        if group is not None:
            self._by_group.setdefault(group, {})[who] = None

    def count(self, event: _Event) -> int:
        """Return how many requests wait for an event."""
        return len(self._by_event.get(event, ()))

    def take(self, event: _Event, most: int | None = None) -> list[_Who]:
        """Remove and return the requests that wait for an event: all, or at most the first `most`."""
        taken = list(self._by_event.get(event, ()))[:most]
        for who in taken:
            self._remove(who)
        return taken

    def take_failed(self, group: str) -> list[_Who]:
        """Remove and return the requests whose wait ends because a group has failed."""
        taken = list(self._by_group.get(group, ()))
        for who in taken:
            self._remove(who)
        return taken

    def forget(self, client: int, request: int | None = None, event: _Event | None = None) -> None:
        """Remove a client's requests: all, or only the one of this number, or only those that wait for an event."""
        for who, (awaited, _) in list(self._waits.items()):
            if who[0] == client and request in (None, who[1]) and event in (None, awaited):
                self._remove(who)

    def _remove(self, who: _Who) -> None:
        event, group = self._waits.pop(who)
        del self._by_event[event][who]
        if not self._by_event[event]:
            del self._by_event[event]
        if group is not None:
            del self._by_group[group][who]
            if not self._by_group[group]:
                del self._by_group[group]
