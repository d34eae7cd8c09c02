"""Builds the replay of an algorithm, with time counted in rounds or simulated on a network.

If time is counted in rounds, each message takes one round. A message begins once its sender and its receiver have both
reached the step that contains the message.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from os import PathLike
from types import ModuleType
from typing import Any, NamedTuple

from unisono.collectives.algorithms import Algorithm, Move, Step, find
from unisono.collectives.algorithms.algorithm import goal, start
from unisono.collectives.verify.prover import verify
from unisono.lab.player.replay import Change, Replay, write
from unisono.lab.simulator import Message, Network, simulate

__all__ = ["Times", "play", "replay_algorithm"]

Times = Mapping[tuple[int, int, int, tuple[tuple[int, int], ...]], tuple[float, float]]
"""Start and end of each message in seconds. The key is the sender, receiver, step and runs; see `Message`."""


class _MatchedMove(NamedTuple):
    """The two moves of an algorithm that send and receive one message, each with the index of its step."""

    sender: int
    sent_in: int
    send: Move
    receiver: int
    received_in: int
    recv: Move


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
    messages = _messages(algorithm, size, nbytes)
    unit = "round" if times is None else "s"

    def contents(at: Callable[[str, int, int, int], int]) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(_sources(collective, at(collective, rank, chunk, size), size) for chunk in range(chunks))
            for rank in range(size)
        )

    first = contents(start)
    carried = _carried(first, messages)
    if times is not None:
        for pair, message in messages.items():
            begin, end = times[message.sender, message.receiver, message.step, message.runs]
            messages[pair] = message._replace(start_s=begin, end_s=end)
    ordered = tuple(sorted(messages.values(), key=lambda message: message.start_s))
    changes = tuple(_changes(first, messages, carried))
    return replace(empty, messages=ordered, start=first, changes=changes, goal=contents(goal), unit=unit)


def _messages(algorithm: Algorithm, size: int, nbytes: int) -> dict[_MatchedMove, Message]:
    """Return every message, ordered by start time."""
    programs = [list(algorithm.steps(rank, size)) for rank in range(size)]
    pairs = list(_pairs(programs))
    rounds = _rounds(programs, pairs)
    offsets = algorithm.offsets(size, nbytes)
    messages = {}
    for pair in pairs:
        begin = max(rounds[pair.sender][pair.sent_in], rounds[pair.receiver][pair.received_in])
        length = sum(offsets[stop] - offsets[start] for start, stop in pair.send.runs)
        reduce = programs[pair.receiver][pair.received_in].reduce
        step = pair.sent_in + 1
        messages[pair] = Message(pair.sender, pair.receiver, pair.send.runs, length, begin, begin + 1, reduce, step)
    return dict(sorted(messages.items(), key=lambda item: item[1].start_s))


def _name(collective: str, chunk: int, size: int) -> str:
    if collective != "all_to_all":
        return str(chunk)
    return f"to {chunk}" if chunk < size else f"of {chunk - size}" if chunk < 2 * size else f"tmp {chunk - 2 * size}"


def _sources(collective: str, members: int, size: int) -> int:
    """Return a bit mask of the contributing ranks. In an all_to_all, `members` has a bit per (source, destination)."""
    if collective != "all_to_all":
        return members
    return sum(1 << rank for rank in range(size) if members >> rank * size & ((1 << size) - 1))


def _pairs(programs: list[list[Step]]) -> Iterator[_MatchedMove]:
    """Yield every message. The n-th send from rank a to rank b matches rank b's n-th receive from rank a."""
    receives: defaultdict[tuple[int, int], list[tuple[int, Move]]] = defaultdict(list)
    for rank, steps in enumerate(programs):
        for index, step in enumerate(steps):
            for move in step.recv:
                receives[move.peer, rank].append((index, move))
    queues = {ends: iter(moves) for ends, moves in receives.items()}
    for rank, steps in enumerate(programs):
        for index, step in enumerate(steps):
            for move in step.send:
                yield _MatchedMove(rank, index, move, move.peer, *next(queues[rank, move.peer]))


def _rounds(programs: list[list[Step]], pairs: list[_MatchedMove]) -> list[list[int]]:
    """Return, for each rank, the number of rounds completed before each of its steps and after its last step."""
    partners: defaultdict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
    for pair in pairs:
        partners[pair.sender, pair.sent_in].add((pair.receiver, pair.received_in))
        partners[pair.receiver, pair.received_in].add((pair.sender, pair.sent_in))
    rounds = [[0] for _ in programs]
    waiting = {rank for rank, steps in enumerate(programs) if steps}
    while waiting:
        for rank in sorted(waiting):
            index = len(rounds[rank]) - 1
            others = partners[rank, index]
            if all(index < len(rounds[peer]) for peer, index in others):
                rounds[rank].append(1 + max(rounds[rank][-1], *(rounds[peer][index] for peer, index in others)))
            if len(rounds[rank]) > len(programs[rank]):
                waiting.discard(rank)
    return rounds


def _carried(
    first: tuple[tuple[int, ...], ...], messages: Mapping[_MatchedMove, Message]
) -> dict[_MatchedMove, list[int]]:
    """Return, for each message, the contents (`Change.members`) that its chunks had when the sender's step began."""
    contents = [list(row) for row in first]
    carried = {}
    before: dict[tuple[int, int], list[int]] = {}
    for _, group in groupby(messages.items(), key=lambda item: item[1].start_s):
        moving = list(group)
        for pair, _ in moving:
            for step in ((pair.sender, pair.sent_in), (pair.receiver, pair.received_in)):
                before.setdefault(step, contents[step[0]].copy())
        for pair, message in moving:
            carried[pair] = [before[pair.sender, pair.sent_in][chunk] for chunk in pair.send.chunks]
            _arrive(contents[pair.receiver], pair, message, carried[pair])
    return carried


def _changes(
    first: tuple[tuple[int, ...], ...],
    messages: Mapping[_MatchedMove, Message],
    carried: Mapping[_MatchedMove, list[int]],
) -> Iterator[Change]:
    """Yield the change that each arriving message makes, in time order."""
    contents = [list(row) for row in first]
    for pair, message in sorted(messages.items(), key=lambda item: item[1].end_s):
        _arrive(contents[pair.receiver], pair, message, carried[pair])
        for chunk in pair.recv.chunks:
            yield Change(message.end_s, pair.receiver, chunk, contents[pair.receiver][chunk])


def _arrive(row: list[int], pair: _MatchedMove, message: Message, carried: list[int]) -> None:
    for chunk, members in zip(pair.recv.chunks, carried, strict=True):
        row[chunk] = members | (row[chunk] if message.reduce else 0)
