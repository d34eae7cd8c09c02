"""Builds the replay of an algorithm, with time counted in rounds or simulated on a network.

If time is counted in rounds, each message takes one round. A message begins once its sender and its receiver have both
reached the step that contains the message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from os import PathLike
from types import ModuleType
from typing import Any, NamedTuple

from unisono.collectives.algorithms import Algorithm, find
from unisono.collectives.algorithms.algorithm import goal, start
from unisono.collectives.verify.prover import ModelChecker, verify
from unisono.collectives.verify.rank_model import RankModel
from unisono.lab.player.replay import Change, Replay, write
from unisono.lab.simulator import Message, Network, simulate

__all__ = ["Times", "play", "replay_algorithm"]

Times = Mapping[tuple[int, int, int, tuple[tuple[int, int], ...]], tuple[float, float]]
"""Start and end of each message in seconds. The key is the sender, receiver, step and runs; see `Message`."""


class _Delivery(NamedTuple):
    """A message, the receiver's chunks that it changes, and its contents (`Change.members`) for each of them."""

    message: Message
    chunks: list[int]
    members: list[int]


class _RecordingChecker(ModelChecker):
    """Run of an algorithm that records its messages.

    Args:
        algorithm: The algorithm.
        size: Number of ranks.
        nbytes: Message size in bytes; the message is divided into chunks.
        times: As for `replay_algorithm`.

    Attributes:
        deliveries: The messages so far; a message comes after all messages on which its contents depend.
    """

    def __init__(self, algorithm: Algorithm, size: int, nbytes: int, times: Times | None) -> None:
        super().__init__(algorithm, size)
        self._offsets = algorithm.offsets(size, nbytes)
        self._times = times
        self.deliveries: list[_Delivery] = []

    def exchange(self, group: dict[int, RankModel]) -> None:
        for model in group.values():
            for (peer, number), recv in model.recvs.items():
                source = self.models[peer]
                send = source.sends[model.rank, number]
                length = sum(self._offsets[stop] - self._offsets[start] for start, stop in send.runs)
                begin: float = max(source.rounds, model.rounds)
                end = begin + 1
                if self._times is not None:
                    begin, end = self._times[peer, model.rank, source.number, send.runs]
                reduce = model.step is not None and model.step.reduce
                message = Message(peer, model.rank, send.runs, length, begin, end, reduce, source.number)
                members = [_sources(self.collective, source.chunks[each].members, self.size) for each in send.chunks]
                self.deliveries.append(_Delivery(message, recv.chunks, members))
        super().exchange(group)


def play(
    path: str | PathLike[str],
    collective: str,
    algorithm: str,
    size: int,
    *,
    nbytes: int = 1 << 20,
    network: Network | None = None,
    **options: Any,
) -> None:
    """Write a self-contained HTML page that replays an algorithm; any browser can open it offline.

    Provisional: it may change in any minor version, without a deprecation.

    Args:
        path: The file to write; an existing file is replaced.
        collective: Name of the collective, such as "all_reduce"; its root, if any, is rank 0.
        algorithm: Name of one of the collective's algorithms.
        size: Number of ranks, up to 32.
        nbytes: Message size in bytes; the message is divided into chunks.
        network: Network on which times are simulated; if None, time is counted in rounds.
        options: Options of the algorithm, as listed in the algorithm's file.

    Raises:
        ValueError: The collective, algorithm or option does not exist, or there is too much to show on a page.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> path = Path(tempfile.mkdtemp()) / "ring.html"
        >>> un.algorithms.play(path, "all_reduce", "ring", size=4)
        >>> path.stat().st_size < 50_000
        True
    """
    chosen = find(collective, algorithm, **options)
    times = None
    if network is not None:
        record = simulate(collective, chosen, size, nbytes, network=network, record=True).record
        times = {(m.sender, m.receiver, m.step, m.runs): (m.start_s, m.end_s) for m in record}
    write(replay_algorithm(chosen, size, nbytes, times), path)


def replay_algorithm(algorithm: Algorithm, size: int, nbytes: int, times: Times | None = None) -> Replay:
    """Return the replay of an algorithm, after verifying that the algorithm is correct.

    Args:
        algorithm: The algorithm.
        size: Number of ranks.
        nbytes: Message size in bytes; the message is divided into chunks.
        times: Simulated times of all messages; if None, time is counted in rounds.

    Raises:
        ValueError: The algorithm is incorrect or does not support `size` ranks, or there is too much to show.
    """
    chunks = algorithm.chunks(size)
    collective = algorithm.collective
    about = (algorithm.file.__doc__ or "") if isinstance(algorithm.file, ModuleType) else ""
    empty = Replay(
        title=f"{collective} by {algorithm.name}",
        about=" ".join(about.partition("\n\n")[0].split()),
        ranks=tuple(f"rank {rank}" for rank in range(size)),
        chunks=tuple(_name(collective, chunk, size) for chunk in range(chunks)),
    )
    verify(collective, algorithm, size)
    nbytes = 0 if collective == "barrier" else nbytes - nbytes % size if algorithm.uniform else nbytes
    checker = _RecordingChecker(algorithm, size, nbytes, times)
    checker.run()

    def contents(at: Callable[[str, int, int, int], int]) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(_sources(collective, at(collective, rank, chunk, size), size) for chunk in range(chunks))
            for rank in range(size)
        )

    first = contents(start)
    messages = (delivery.message for delivery in checker.deliveries)
    return replace(
        empty,
        messages=tuple(sorted(messages, key=lambda message: (message.start_s, message.sender))),
        start=first,
        changes=tuple(_changes(first, checker.deliveries)),
        goal=contents(goal),
        unit="round" if times is None else "s",
    )


def _name(collective: str, chunk: int, size: int) -> str:
    if collective != "all_to_all":
        return str(chunk)
    return f"to {chunk}" if chunk < size else f"of {chunk - size}" if chunk < 2 * size else f"tmp {chunk - 2 * size}"


def _sources(collective: str, members: int, size: int) -> int:
    """Return a bit mask of the contributing ranks. In an all_to_all, `members` has a bit per (source, destination)."""
    if collective != "all_to_all":
        return members
    return sum(1 << rank for rank in range(size) if members >> rank * size & ((1 << size) - 1))


def _changes(first: tuple[tuple[int, ...], ...], deliveries: list[_Delivery]) -> Iterator[Change]:
    """Yield the change that each arriving message makes to each of its chunks, in time order."""
    contents = [list(row) for row in first]
    for message, chunks, members in sorted(deliveries, key=lambda delivery: delivery.message.end_s):
        row = contents[message.receiver]
        for chunk, arrived in zip(chunks, members, strict=True):
            row[chunk] = arrived | (row[chunk] if message.reduce else 0)
            yield Change(message.end_s, message.receiver, chunk, row[chunk])
