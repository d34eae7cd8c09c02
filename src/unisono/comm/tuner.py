"""Agreement of a communicator's ranks on one cost table: that of rank 0, before the first call that uses it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence

from unisono.collectives.tuning.cost_table import CostTable
from unisono.collectives.tuning.prediction import Machine
from unisono.comm.table_file import TableFile
from unisono.core.control import ControlPlane
from unisono.core.tracing import SINK, Event, Sink
from unisono.core.transport import Options, Transport

__all__ = ["Tuner"]

_log = logging.getLogger("unisono")


class Tuner:
    """Cost table of a communicator.

    Args:
        transport: Its built-in constants serve where there is no table.
        control: Passes rank 0's table to all ranks.
        options: For the backend and the timeout.
        hosts: Name of each rank's host.

    Attributes:
        hosts: As passed.
    """

    def __init__(self, transport: Transport, control: ControlPlane, options: Options, hosts: Sequence[str]) -> None:
        self._transport, self._control, self._options = transport, control, options
        self.hosts, self._ranks = hosts, list(Counter(hosts).values())
        consecutive = [host for host, before in zip(hosts, [None, *hosts], strict=False) if host != before]
        even = len(set(self._ranks)) == 1 and len(consecutive) == len(self._ranks)
        self._per_host = self._ranks[0] if even else 0
        self._machine: Machine | None = None
        self._agreements = 0
        self._traced: Sink | None = None

    def machine(self) -> Machine:
        """Return the table and the hosts. Collective at first: rank 0 loads its table, and all ranks use it."""
        machine = self._machine or self._agree(None)
        sink = SINK.get()
        if sink is not None and sink is not self._traced:
            group, now = self._transport.group, time.perf_counter()
            detail = {"hash": machine.table.hash, "overrides": dict(machine.table.overrides)}
            name = f"cost table {machine.table.hash}"
            sink(Event("cost_table", name, group.name, group.rank, now, now, 0, detail, group.members[group.rank]))
        self._traced = sink
        return machine

    def adopt(self, measured: CostTable | None) -> CostTable:
        """Use a table that rank 0 has measured, and store it there. Collective.

        Args:
            measured: The table, on rank 0.
        """
        return self._agree(measured).table

    def _agree(self, measured: CostTable | None) -> Machine:
        self._agreements += 1
        group = self._transport.group
        mine: tuple[str, str] = "", ""
        if group.rank == 0:
            try:
                mine = "", self._own(measured).to_json()
            except ValueError as error:
                mine = str(error), ""
        topic = f"cost table {self._agreements}"
        refusal, text = self._control.exchange(group, topic, mine, self._options.timeout_s)[0]
        if refusal:
            raise ValueError(refusal)
        table = CostTable.from_json(text)
        self._machine = Machine(table, self._per_host)
        if group.rank == 0:
            overrides = ", ".join(f"{name}={algorithm}" for name, algorithm in table.overrides)
            origin = "measured" if table.measured else "built-in"
            _log.info("cost table %s (%s)%s", table.hash, origin, overrides and f", overridden: {overrides}")
        return self._machine

    def _own(self, measured: CostTable | None) -> CostTable:
        """Return rank 0's table, with the overrides of its file and of its environment."""
        file = TableFile(self._options.backend, self._ranks)
        stored = file.load()
        if measured is not None:
            measured = measured.with_overrides(dict(stored.overrides) if stored else {})
            file.store(measured)
        builtin = CostTable.builtin(self._transport.latency_s, self._transport.second_per_byte)
        return (measured or stored or builtin).with_overrides(file.overrides())
