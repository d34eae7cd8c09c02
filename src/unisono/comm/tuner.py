"""Makes all of a communicator's ranks use rank 0's cost table, starting with the first call that needs it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from unisono.collectives.algorithms import serving
from unisono.collectives.tuning.cost_table import CostTable, TableFile
from unisono.collectives.tuning.fit import Cell, Fit, fit
from unisono.collectives.tuning.prediction import Machine
from unisono.core import clock
from unisono.core.control import ControlPlane
from unisono.core.tracing import SINK, Sink, emit
from unisono.core.transport import Options, Transport
from unisono.host.processors import cores

__all__ = ["Tuner", "measured_table"]

_log = logging.getLogger("unisono")


class Tuner:
    """Cost table of a communicator.

    Args:
        transport: Transport that supplies default constants if there is no table.
        control: Control plane that passes rank 0's table to all ranks.
        options: Options that supply the backend and the timeout.
        hosts: Name of each rank's host.

    Attributes:
        control: The control plane as passed, or its replacement while the communicator is recorded.
        hosts: Name of each rank's host.
    """

    def __init__(self, transport: Transport, control: ControlPlane, options: Options, hosts: Sequence[str]) -> None:
        self._transport = transport
        self.control = control
        self._options = options
        self.hosts = hosts
        self._ranks = list(Counter(hosts).values())
        consecutive = [host for host, before in zip(hosts, [None, *hosts], strict=False) if host != before]
        even = len(set(self._ranks)) == 1 and len(consecutive) == len(self._ranks)
        self._per_host = self._ranks[0] if even else 0
        self._machine: Machine | None = None
        self._agreements = 0
        self._traced: Sink | None = None

    def machine(self) -> Machine:
        """Return the cost table and the number of ranks per host.

        Collective on the first call: rank 0 loads its table, and all ranks use it.
        """
        machine = self._machine or self.adopt(None)
        sink = SINK.get()
        if sink is not None and sink is not self._traced:
            detail = {"hash": machine.table.hash, "overrides": dict(machine.table.overrides)}
            name = f"cost table {machine.table.hash}"
            emit(sink, "cost_table", name, self._transport.group, time.perf_counter(), 0, detail)
        self._traced = sink
        return machine

    def adopt(self, measured: CostTable | None) -> Machine:
        """Agree on a table: the one that rank 0 has just measured (and stores), or the one it has. Collective.

        Args:
            measured: The table that rank 0 has measured, on rank 0; None to use the one it has.
        """
        self._agreements += 1
        group = self._transport.group
        topic = f"cost table {self._agreements}"
        mine = "", ""
        if group.rank == 0:
            # A replay neither reads nor replaces this host's cost table.
            mine = self.control.measured(group, topic, lambda: self._offer(measured))
        refusal, text = self.control.exchange(group, topic, mine, self._options.timeout_s)[0]
        if refusal:
            raise ValueError(refusal)
        table = CostTable.from_json(text)
        self._machine = Machine(table, self._per_host)
        if group.rank == 0:
            overrides = ", ".join(f"{name}={algorithm}" for name, algorithm in table.overrides)
            origin = "measured" if table.measured else "built-in"
            _log.info("cost table %s (%s)%s", table.hash, origin, overrides and f", overridden: {overrides}")
        return self._machine

    def _offer(self, measured: CostTable | None) -> tuple[str, str]:
        """Return rank 0's table as text, or the reason why it has none."""
        try:
            return "", self._own(measured).to_json()
        except ValueError as error:
            return str(error), ""

    def _own(self, measured: CostTable | None) -> CostTable:
        """Return rank 0's table, with the overrides from its file and environment."""
        file = TableFile(self._options.backend, self._ranks)
        stored = file.load()
        if measured is not None:
            measured = measured.with_overrides(dict(stored.overrides) if stored else {})
            file.store(measured)
        builtin = CostTable.builtin(self._transport.latency_s, self._transport.second_per_byte)
        return (measured or stored or builtin).with_overrides(file.overrides())


_SIZES = (64, 64 << 10, 512 << 10, 4 << 10)
"""Tensor sizes in bytes; the first two are always measured, because one size cannot separate bandwidth from latency."""
_ALGORITHMS = ("recursive_doubling", "ring", "two_shot", "one_shot", "chunked_ring:segments=8")
_CALLS = 4
"""Number of calls per sample: more than one, so that a call overlaps with the next one, as in a program."""


def measured_table(comm: Any, tuner: Tuner, device: str, seconds: float) -> CostTable:
    """Return the table that all ranks of a communicator use from now on. Collective.

    Args:
        comm: The communicator.
        tuner: Its cost table.
        device: Device of the tensors.
        seconds: Approximate maximum duration of the measurement.
    """
    if comm.size == 1:
        return tuner.machine().table
    if len(set(tuner.hosts)) == 1:
        inside = between = _fitted(comm, device, seconds, cores())
    else:
        first = tuner.hosts.index(tuner.hosts[comm.rank])
        with comm.split(first) as host:
            inside = _fitted(host, device, seconds / 2, cores())
        leaders = comm.split(0 if first == comm.rank else None)
        between = None
        if leaders is not None:
            with leaders:
                between = _fitted(leaders, device, seconds / 2, 0)
    if between is None:
        return tuner.adopt(None).table
    near = inside or between
    return tuner.adopt(CostTable(near.link, between.link, near.gamma, near.overhead, cores=cores())).table


def _fitted(comm: Any, device: str, seconds: float, cores: int) -> Fit | None:
    """Time calls on a communicator. On rank 0, return the constants fitted to them; None elsewhere, or on a lone rank.

    The communicator's ranks share `cores` cores; 0 means that each rank is on its own host.
    """
    cells = _measured(comm, device, seconds) if comm.size > 1 else []
    return fit(cells, cores) if cells and comm.rank == 0 else None


def _measured(comm: Any, device: str, seconds: float) -> list[Cell]:
    end = clock.now() + 0.9 * seconds
    cells = list[Cell]()
    known = serving("all_reduce", comm.size)
    names = [name for name in _ALGORITHMS if name.partition(":")[0] in known]
    for place, nbytes in enumerate(_SIZES):
        tensor = torch.zeros(nbytes // 4, device=device)
        calls: dict[tuple[str, str], Callable[[], object]] = {
            ("all_reduce", name): partial(comm.all_reduce, tensor, algorithm=name) for name in names
        }
        calls["broadcast", "binomial"] = partial(comm.broadcast, tensor, 0, algorithm="binomial")
        begin = clock.now()
        for call in calls.values():
            call()
        now = clock.now()
        # Rank 0 decides how many samples fit into a message size's share of the remaining time; the other ranks use the
        # same number.
        share = (end - now) / (len(_SIZES) - place)
        fitting = min(20, int(share / (_CALLS * (now - begin))))
        rounds = torch.tensor([comm._engine.measured("rounds", partial(max, 0, fitting))], device=device)
        comm.broadcast(rounds, 0)
        if not int(rounds) and place > 1:
            break
        samples: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
        for _ in range(max(1, int(rounds))):
            for key, call in calls.items():
                comm.barrier()
                begin = clock.now()
                for _ in range(_CALLS):
                    call()
                samples[key].append((clock.now() - begin) / _CALLS)
        cells += [Cell(*key, comm.size, nbytes, median(taken)) for key, taken in samples.items()]
    return cells
