"""Exports algorithms as GOAL text for LogGOPSim, and simulations as Chrome traces."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from unisono.collectives.algorithms import Algorithm, AlgorithmFile, Step, algorithm_of
from unisono.lab.simulator.simulation import Simulation

__all__ = ["chrome_trace", "goal"]


def goal(
    collective: str,
    algorithm: str | AlgorithmFile | Algorithm,
    size: int,
    nbytes: int,
    *,
    gamma: float = 0.0,
    itemsize: int = 1,
) -> str:
    """Return an algorithm as a GOAL schedule, the text format of LogGOPSim's `txt2bin`.

    Provisional: it may change in any minor version, without a deprecation.

    All messages of a step depend on the end of the previous step. The n-th message between two ranks has tag n. Source
    for GOAL: Hoefler, Siebert and Lumsdaine, "Group operation assembly language", ICPP 2009.

    Args:
        collective: Name of the collective, such as "all_reduce"; its root, if any, is rank 0.
        algorithm: A name, an `AlgorithmFile` from `algorithms/<collective>/`, or an `Algorithm` with its options.
        size: Number of ranks.
        nbytes: Message size in bytes, as in `simulate`.
        gamma: Time to reduce one received byte, in seconds. Unless `gamma` is 0, the schedule has a `calc` operation
            for each message that is reduced, with its time in nanoseconds.
        itemsize: Element size in bytes; chunks contain whole elements.

    Raises:
        ValueError: The collective or algorithm does not exist, or the algorithm does not support `size` ranks.

    Example:
        >>> print(un.algorithms.goal("broadcast", "binomial", size=2, nbytes=8))
        num_ranks 2
        rank 0 {
        l1: send 8b to 1 tag 0
        }
        rank 1 {
        l1: recv 8b from 0 tag 0
        }
    """
    algorithm = algorithm_of(collective, algorithm, size)
    if collective == "all_to_all" and nbytes % (size * itemsize):
        raise ValueError(f"{nbytes} bytes are not {size} equal parts of whole elements, which an all_to_all has")
    offsets = algorithm.offsets(size, nbytes, itemsize)
    lines = [f"num_ranks {size}"]
    for rank in range(size):
        lines += [f"rank {rank} {{", *_operations(algorithm.steps(rank, size), offsets, gamma), "}"]
    return "\n".join(lines)


def _operations(steps: Iterator[Step], offsets: list[int], gamma: float) -> Iterator[str]:
    number = 0
    before = 0
    sent = Counter[int]()
    received = Counter[int]()
    for step in steps:
        ended = []
        for moves, verb, tags in ((step.send, "send {}b to {}", sent), (step.recv, "recv {}b from {}", received)):
            for move in moves:
                nbytes = sum(offsets[stop] - offsets[start] for start, stop in move.runs)
                number += 1
                yield f"l{number}: {verb.format(nbytes, move.peer)} tag {tags[move.peer]}"
                tags[move.peer] += 1
                if before:
                    yield f"l{number} requires l{before}"
                if verb.startswith("recv") and step.reduce and gamma:
                    yield f"l{number + 1}: calc {round(nbytes * gamma * 1e9)}"
                    yield f"l{number + 1} requires l{number}"
                    number += 1
                ended.append(number)
        before = number = number + (len(ended) > 1)
        if len(ended) > 1:
            yield f"l{number}: calc 0"
            yield from (f"l{number} requires l{each}" for each in ended)


def chrome_trace(simulation: Simulation) -> str:
    """Return the recorded messages as a Chrome trace: JSON for chrome://tracing and ui.perfetto.dev.

    Provisional: it may change in any minor version, without a deprecation.

    Each message is a bar on the sender's line, with an arrow to the receiver's line.

    Args:
        simulation: Result of `simulate(..., record=True)`.

    Raises:
        ValueError: The messages were not recorded.

    Example:
        >>> result = un.algorithms.simulate("all_reduce", "ring", size=2, nbytes=1000, record=True)
        >>> import json
        >>> json.loads(un.algorithms.chrome_trace(result))["traceEvents"][2]["name"]
        'to 1: 500 B, step 1'
    """
    if simulation.messages and not simulation.record:
        raise ValueError("the messages were not recorded; pass record=True to simulate")
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
        for rank in range(len(simulation.ends))
    ]
    for number, message in enumerate(simulation.record):
        start = message.start_s * 1e6
        end = message.end_s * 1e6
        common = {"cat": "message", "pid": 0}
        name = f"to {message.receiver}: {message.nbytes} B, step {message.step}"
        bar = {"name": name, "ph": "X", "ts": start, "dur": end - start, "tid": message.sender}
        arrow = {"name": "message", "id": number}
        events += [
            {**common, **bar, "args": {"runs": message.runs, "reduce": message.reduce}},
            {**common, **arrow, "ph": "s", "ts": start, "tid": message.sender},
            {**common, **arrow, "ph": "f", "bp": "e", "ts": end, "tid": message.receiver},
        ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"})
