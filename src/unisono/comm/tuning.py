"""Measurement of the machine, and explanation of what `algorithm="auto"` chooses."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from unisono.collectives.algorithms import serving
from unisono.collectives.selection import Needs, explain
from unisono.collectives.tuning.cost_table import CostTable
from unisono.collectives.tuning.fit import Cell, Fit, fit
from unisono.collectives.tuning.prediction import Choice, size_class
from unisono.comm.reductions import ReductionMixin
from unisono.comm.rooted import RootedMixin
from unisono.comm.subgroups import SubgroupMixin
from unisono.core.collective import family_of
from unisono.core.reduce_op import check_reducible, parse_op
from unisono.core.types import ReduceOp
from unisono.host.cpu_count import cores

__all__ = ["TuningMixin"]

_SIZES = (64, 64 << 10, 512 << 10, 4 << 10)
"""The first two are always measured: one size cannot separate bytes from latency."""
_ALGORITHMS = ("recursive_doubling", "ring", "two_shot", "one_shot", "chunked_ring:segments=8")
_CALLS = 4
"""Calls per sample: a call overlaps with the next one, as in a program."""


class TuningMixin(RootedMixin, ReductionMixin, SubgroupMixin):
    """Choice of algorithms by a table of costs."""

    def tune(self, seconds: float = 2.0) -> CostTable:
        """Measure what messages cost, and let `algorithm="auto"` choose by that from now on. Collective.

        Times calls of a few algorithms and sizes, and fits latency, bandwidth, reduction and the overhead of a
        message to them. All ranks use rank 0's result, which it stores in the user's cache folder for later programs
        on the same backend, number of ranks on each host, and processor.

        Args:
            seconds: Time for all of it, at most about this.

        Returns:
            The table.

        Raises:
            ValueError: `seconds` is not positive.

        Example:
            >>> un.launch(lambda comm: comm.tune(seconds=0.1).measured, nprocs=2, backend="thread")
            [True, True]
        """
        if not seconds > 0:
            raise ValueError(f"seconds must be a positive number, not {seconds}")
        self._engine.enter("tune")
        tuner = self._engine.tuner
        if self.size == 1:
            return tuner.machine().table
        if len(set(tuner.hosts)) == 1:
            inside = between = _fitted(self, seconds, cores())
        else:
            first = tuner.hosts.index(tuner.hosts[self.rank])
            with self.split(first) as host:
                inside = _fitted(host, seconds / 2, cores())
            leaders, between = self.split(0 if first == self.rank else None), None
            if leaders is not None:
                with leaders:
                    between = _fitted(leaders, seconds / 2, 0)
        if between is None:
            return tuner.adopt(None)
        near = inside or between
        return tuner.adopt(CostTable(near.link, between.link, near.gamma, near.overhead, cores=cores()))

    def plan(
        self,
        collective: str,
        nbytes: int,
        *,
        dtype: torch.dtype = torch.float32,
        op: str | ReduceOp = "sum",
        algorithm: str | None = None,
    ) -> Choice:
        """Return what `algorithm="auto"` stands for in a call, why, and the predicted times of other algorithms.

        Collective if neither this nor a call with "auto" nor `tune` has been made before: ranks agree on a table.

        Args:
            collective: "all_reduce", "broadcast", ...; roots are rank 0.
            nbytes: Bytes of the message: of one rank's input, or of its output where that is longer.
            dtype, op: As in the call; reductions of floating-point numbers permit fewer algorithms.
            algorithm: Another algorithm to predict.

        Raises:
            ValueError: There is no such collective or algorithm, or it cannot serve the call.

        Example:
            >>> plan = un.launch(lambda comm: comm.plan("all_reduce", 1024), nprocs=4, backend="thread")[0]
            >>> plan.algorithm in un.algorithms.serving("all_reduce", 4), plan.predicted_s < 1
            (True, True)
        """
        family, reduced = family_of(collective), parse_op(op)
        if nbytes < 0:
            raise ValueError(f"nbytes must be at least 0, not {nbytes}")
        if family.reduces:
            check_reducible(reduced, dtype)
        self._engine.enter("plan")
        machine = self._engine.tuner.machine()
        exact = not (dtype.is_floating_point or dtype.is_complex)
        rounded = family.reduces and reduced in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT) and not exact
        balanced = rounded and self._engine.options.deterministic
        needs = Needs(collective, self.size, rounded, balanced, rotated=False)
        why = "set by the argument"
        if algorithm is None:
            algorithm = dict(machine.table.overrides).get(collective)
            why = "" if algorithm is None else "set by UNISONO_ALGORITHM or the overrides of the table"
        return explain(needs, size_class(nbytes), machine, algorithm, why)


def _fitted(comm: TuningMixin, seconds: float, cores: int) -> Fit | None:
    """Return the constants that fit the calls of a communicator; None except on rank 0, and if there is no other.

    Its ranks share the cores; 0 if each is on a host of its own.
    """
    cells = _measured(comm, seconds) if comm.size > 1 else []
    return fit(cells, cores) if cells and comm.rank == 0 else None


def _measured(comm: TuningMixin, seconds: float) -> list[Cell]:
    end = time.monotonic() + 0.9 * seconds
    cells, device = list[Cell](), comm._engine.options.device
    known = serving("all_reduce", comm.size)
    names = [name for name in _ALGORITHMS if name.partition(":")[0] in known]
    for place, nbytes in enumerate(_SIZES):
        tensor = torch.zeros(nbytes // 4, device=device)
        calls: dict[tuple[str, str], Callable[[], object]] = {
            ("all_reduce", name): partial(comm.all_reduce, tensor, algorithm=name) for name in names
        }
        calls["broadcast", "binomial"] = partial(comm.broadcast, tensor, 0, algorithm="binomial")
        begin = time.monotonic()
        for call in calls.values():
            call()
        now = time.monotonic()
        # Rank 0 decides for all how many samples there is time for.
        share = (end - now) / (len(_SIZES) - place)
        rounds = torch.tensor([max(0, min(20, int(share / (_CALLS * (now - begin)))))], device=device)
        comm.broadcast(rounds, 0)
        if not int(rounds) and place > 1:
            break
        samples: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
        for _ in range(max(1, int(rounds))):
            for key, call in calls.items():
                comm.barrier()
                begin = time.monotonic()
                for _ in range(_CALLS):
                    call()
                samples[key].append((time.monotonic() - begin) / _CALLS)
        cells += [Cell(*key, comm.size, nbytes, median(taken)) for key, taken in samples.items()]
    return cells
