"""Queries about ranks' activities."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

from unisono.control.replies import Outgoing

__all__ = ["StatusQueries"]


@dataclass(slots=True)
class _Survey:
    client: int
    request: int
    labels: dict[int, tuple[str, int]]
    answers: dict[int, bytes] = field(default_factory=dict)


class StatusQueries:
    """Queries about some clients' activities. An unresponsive client does not delay the others for long.

    The answer to a query is a list of pairs: a client's group and rank, and its report or None.
    """

    def __init__(self) -> None:
        self._open: dict[int, _Survey] = {}
        self._numbers = itertools.count(1)

    def start_query(self, client: int, request: int, labels: Mapping[int, tuple[str, int]]) -> Outgoing:
        """Send the query to these clients."""
        number = next(self._numbers)
        survey = self._open[number] = _Survey(client, request, dict(labels))
        return [*[(receiver, (0, "asked", number)) for receiver in labels], *self._conclude(number, survey)]

    def answer(self, client: int, number: int, content: bytes) -> Outgoing:
        """Record a client's answer; a late answer is ignored."""
        survey = self._open.get(number)
        if survey is None or client not in survey.labels:
            return []
        survey.answers[client] = content
        return self._conclude(number, survey)

    def end_query(self, client: int, request: int) -> Outgoing:
        """End a query: its requester stops waiting, and receives the answers so far."""
        out: Outgoing = []
        for number, survey in list(self._open.items()):
            if (survey.client, survey.request) == (client, request):
                out += self._conclude(number, survey, require_all=False)
        return out

    def forget(self, client: int) -> Outgoing:
        """Drop the queries of a client that has left, and stop waiting for its answers to other queries."""
        out: Outgoing = []
        for number, survey in list(self._open.items()):
            if survey.client == client:
                del self._open[number]
            elif survey.labels.pop(client, None) is not None:
                out += self._conclude(number, survey)
        return out

    def _conclude(self, number: int, survey: _Survey, *, require_all: bool = True) -> Outgoing:
        if require_all and len(survey.answers) < len(survey.labels):
            return []
        del self._open[number]
        pairs = [(label, survey.answers.get(client)) for client, label in survey.labels.items()]
        return [(survey.client, (survey.request, "ok", sorted(pairs, key=lambda pair: pair[0])))]
