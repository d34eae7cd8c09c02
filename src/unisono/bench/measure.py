"""The measurement, as one rank takes part in it: contenders in turn, there and back, each result verified."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from unisono.bench.memory import Pool
from unisono.bench.own import Own
from unisono.bench.peer import Peer
from unisono.bench.peers import PEERS
from unisono.bench.problem import Problem, Slot
from unisono.bench.row import Against, Row, Spread
from unisono.bench.settings import Settings
from unisono.communicator import Communicator

__all__ = ["measure"]

_MOST_PASSES = 2000


def measure(comm: Communicator, settings: Settings, folder: Path, tell: Callable[[Row], None]) -> list[Row]:
    """A row for each size, the same on every rank. Collective over `comm`.

    Args:
        comm: The ranks, as many as the settings say.
        settings: What to measure.
        folder: Empty, and seen by all ranks.
        tell: Called with each row as soon as it is known.
    """
    with ExitStack() as stack:
        contenders: dict[str, Peer] = {"": Own(comm, folder, settings.algorithm)}
        for name in settings.against:
            contenders[name] = PEERS[name](comm, folder)
            stack.callback(contenders[name].close)
        rows = []
        for problem in settings.problems:
            rows.append(_Size(comm, settings, problem, contenders).measure())
            tell(rows[-1])
        # Nobody lets go of a connection that another one still uses.
        comm.barrier()
        return rows


class _Size:
    """All contenders at one problem."""

    def __init__(self, comm: Communicator, settings: Settings, problem: Problem, contenders: dict[str, Peer]) -> None:
        self._comm, self._settings, self._problem, self._contenders = comm, settings, problem, contenders

        def ordinary(numel: int) -> torch.Tensor:
            return torch.empty(numel, dtype=problem.dtype)

        def registered(numel: int) -> torch.Tensor:
            return comm.empty(numel, problem.dtype)

        shared = Pool(problem, ordinary, cold=settings.cold) if contenders.keys() - {""} else None
        own = registered if settings.registered else ordinary
        mine = shared if shared and not settings.registered else Pool(problem, own, cold=settings.cold)
        self._pools = {name: mine if name == "" else shared or mine for name in contenders}
        for pool in {id(pool): pool for pool in self._pools.values()}.values():
            pool.fill(comm.rank)
        self._wrong = dict.fromkeys(contenders, 0)
        self._calls: dict[tuple[str, int], Callable[[], object]] = {}

    def measure(self) -> Row:
        names = list(self._contenders)
        algorithm = self._chosen()
        with _no_collection():
            # The first calls make what later ones use again.
            for name in names:
                self._sample(name)
            began = time.perf_counter()
            for name in names:
                self._sample(name)
            passes = self._agreed(self._settings.seconds / (time.perf_counter() - began))
            times = torch.empty(passes, len(names), dtype=torch.float64)
            for number in range(passes):
                for index in range(len(names)) if number % 2 == 0 else reversed(range(len(names))):
                    times[number, index] = self._sample(names[index])
        return self._row(algorithm, times)

    def _agreed(self, passes: float) -> int:
        least = self._settings.least
        agreed = self._comm.broadcast_object(min(max(least, int(passes)), max(least, _MOST_PASSES)))
        assert isinstance(agreed, int)
        return agreed

    def _chosen(self) -> str:
        own = self._contenders[""]
        assert isinstance(own, Own)
        slot = self._pools[""].next()[0]
        self._problem.fill(slot, self._comm.rank)
        algorithm = own.chosen(own.bind(self._problem, slot))
        self._problem.fill(slot, self._comm.rank)
        return algorithm

    def _sample(self, name: str) -> float:
        """Seconds of one call, the mean of a few that follow each other; verified, and all made ready for the next."""
        problem, contender, rank = self._problem, self._contenders[name], self._comm.rank
        slots = self._pools[name].next()
        calls = [self._bound(name, slot) for slot in slots]
        if not self._settings.cold:
            for slot in slots:
                problem.fill(slot, rank)
        self._comm.barrier()
        began = time.perf_counter()
        for call in calls:
            call()
        seconds = (time.perf_counter() - began) / len(calls)
        # Nobody verifies while another's clock still runs.
        self._comm.barrier()
        for slot in slots:
            if contender.verified:
                self._wrong[name] += problem.wrong(slot, rank)
            if self._settings.cold:
                problem.fill(slot, rank)
        return seconds

    def _bound(self, name: str, slot: Slot) -> Callable[[], object]:
        """The call, prepared once: as long as this lasts, a slot stays what it is."""
        call = self._calls.get((name, id(slot)))
        if call is None:
            call = self._calls[name, id(slot)] = self._contenders[name].bind(self._problem, slot)
        return call

    def _row(self, algorithm: str, times: torch.Tensor) -> Row:
        problem, names = self._problem, list(self._contenders)
        # A call is over when the last rank is through.
        self._comm.all_reduce(times, "max")
        wrong = torch.tensor(list(self._wrong.values()))
        self._comm.all_reduce(wrong)
        own = times[:, 0]
        against = {
            name: Against(
                Spread.of((times[:, index] * 1e6).tolist()).median,
                Spread.of((times[:, index] / own).tolist()),
                int(wrong[index]),
            )
            for index, name in enumerate(names)
            if index
        }
        return Row(
            problem.collective,
            problem.ranks,
            problem.nbytes,
            problem.count,
            str(problem.dtype).removeprefix("torch."),
            problem.op.value,
            algorithm,
            Spread.of((own * 1e6).tolist()),
            int(wrong[0]),
            len(times),
            against,
        )


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected while the clock runs."""
    gc.collect()
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
