"""Traces a program into one file for all ranks, with their clocks aligned."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

import torch

from unisono.core.staging import current_streams
from unisono.core.tracing import TraceEvent, recording
from unisono.core.types import CommunicatorLike
from unisono.diagnostics.trace_file import Json, merged, rank_events
from unisono.host.processors import core_wait_s

__all__ = ["ClockReading", "trace"]

_ROUNDS = 16
_now = time.perf_counter


@contextmanager
def trace(path: str | os.PathLike[str], comm: CommunicatorLike | None = None) -> Iterator[list[TraceEvent]]:
    """Record the collectives, messages, buckets and waits inside the `with` block, and write them to `path` at the end.

    With `comm`, this is collective: rank 0 writes one file for all ranks, with their clocks aligned at the beginning
    and the end, and an arrow for each message. The file is JSON in the trace-event format that Perfetto and
    chrome://tracing open; `unisono trace summary` reads it. If a rank's program raises, that rank writes only its own
    part, such as `run.rank3.json` next to `run.json`; `unisono trace merge` merges these files.

    Calls from other threads are not recorded. Recorded calls bypass the fast path, like calls that name an algorithm.

    Args:
        path: File to write, replaced if it exists. Without `comm`, each rank needs its own file.
        comm: The ranks that are traced together; all of them must enter the `with` block. If None, only this rank is
            traced.

    Yields:
        The list of this rank's events; each is appended when it ends.

    Raises:
        OSError: The file cannot be written at the end of the `with` block.
        CommError: A rank did not reach the beginning or the end of the `with` block.

    Cost: about 10 us per call, and 17 short collectives at each end of the block to align the clocks.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "run.json"
        >>> def program(comm):
        ...     with un.trace(path, comm):
        ...         comm.all_reduce(torch.ones(4))
        >>> _ = un.launch(program, nprocs=2, backend="thread")
        >>> found = json.loads(path.read_text())["traceEvents"]
        >>> sorted(event["pid"] for event in found if event["name"] == "all_reduce" and event["cat"] == "collective")
        [0, 1]
    """
    events: list[TraceEvent] = []
    clocks = [] if comm is None else [ClockReading(comm)]
    # Don't measure a simulated rank's wait for a core, because it takes no virtual time.
    waited = None if comm is not None and comm.backend == "sim" else core_wait_s()
    try:
        with recording(events.append):
            yield events
        if comm is not None:
            clocks.append(ClockReading(comm))
            part = comm._engine.measured("a trace", lambda: json.dumps(_part(events, clocks, waited)))
            parts = comm.gather_object(part)
            if parts is not None:
                _write(Path(path), [json.loads(part) for part in parts], clocks)
    except BaseException as error:
        try:
            _write_own(path, comm, _part(events, clocks, waited), clocks)
        except OSError as unwritten:
            error.add_note(f"its trace could not be written: {unwritten}")
        raise
    if comm is None:
        _write_own(path, comm, _part(events, clocks, waited), clocks)


def _write_own(
    path: str | os.PathLike[str], comm: CommunicatorLike | None, part: list[Json], clocks: list[ClockReading]
) -> None:
    """Write only this rank's part."""
    own = Path(path)
    own = own if comm is None else own.with_suffix(f".rank{comm.rank}{own.suffix}")
    _write(own, [part], clocks)


class ClockReading:
    """This rank's clock relative to rank 0's. Collective.

    In each round, every rank reads its clock, and all ranks gather the readings. No rank can receive all readings
    before the last rank has sent its own, so no rank's round ends before every rank has read its clock. The readings of
    several rounds bound the offset between two clocks from both sides. An offset whose bounds include zero counts as
    zero: ranks on one host read the same clock, whereas clocks on different hosts start at different moments, and are
    unlikely to agree by chance.

    Attributes:
        at_s: Time of the reading, on this rank's clock.
        offset_s: This rank's clock minus rank 0's.
        uncertainty_s: Largest error of any rank's offset.
        digest: Hash of all ranks' times, equal on all ranks and unique to this reading.
    """

    def __init__(self, comm: CommunicatorLike) -> None:
        starts = torch.empty(_ROUNDS, comm.size, dtype=torch.float64, device=comm.device)
        ends = torch.empty(_ROUNDS, dtype=torch.float64)
        all_ends = starts.new_empty(comm.size * _ROUNDS)
        for number in range(_ROUNDS):
            comm.all_gather_single(starts[number], starts.new_tensor([comm._engine.measured("a clock", _now)]))
            for stream in current_streams([comm.device]):
                stream.synchronize()
            ends[number] = comm._engine.measured("a clock", _now)
        comm.all_gather_single(all_ends, ends.to(starts))
        begun = starts.cpu()
        ended = all_ends.cpu().view(comm.size, _ROUNDS).T
        least = (begun - ended[:, :1]).amax(0)
        most = (ended - begun[:, :1]).amin(0)
        same = (least <= 0) & (most >= 0)
        self.digest: str = blake2b(str(begun.tolist()).encode(), digest_size=8).hexdigest()
        self.at_s: float = _now()
        self.offset_s: float = (least + most).div(2).masked_fill(same, 0.0)[comm.rank].item()
        self.uncertainty_s: float = (most - least).div(2).masked_fill(same, 0.0).max().item()


def _aligned(clocks: list[ClockReading]) -> Callable[[float], float]:
    """Return the map from this rank's clock to rank 0's. The offset is assumed to drift linearly between readings."""
    if not clocks:
        return lambda moment: moment
    first = clocks[0]
    last = clocks[-1]
    drift = (last.offset_s - first.offset_s) / max(last.at_s - first.at_s, 1e-9)
    return lambda moment: moment - first.offset_s - drift * (moment - first.at_s)


def _part(events: list[TraceEvent], clocks: list[ClockReading], before_s: float | None) -> list[Json]:
    after_s = core_wait_s()
    waited_s = None if before_s is None or after_s is None else after_s - before_s
    return rank_events(events, socket.gethostname(), os.getpid(), _aligned(clocks), waited_s)


def _write(path: Path, parts: list[list[Json]], clocks: list[ClockReading]) -> None:
    uncertainty_s = max((clock.uncertainty_s for clock in clocks), default=0.0)
    run = {"run": clocks[0].digest} if clocks else {}
    path.write_text(json.dumps(merged(parts, {"clock_uncertainty_us": round(uncertainty_s * 1e6, 3), **run})))
