"""Simulated ranks: threads that run one at a time on a virtual clock, so that a run depends only on its seed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import Any, Literal

import torch

from unisono.communicator import Check
from unisono.control.simulated import SimulatedHub
from unisono.core.group import Group
from unisono.core.notebook import html_table
from unisono.core.thread_ranks import OWN_GENERATORS, ThreadRank, own_generators
from unisono.core.threads import refuse_green_threads
from unisono.core.transport import Options, Transport
from unisono.core.types import Timeout
from unisono.core.work import positive_timeout
from unisono.diagnostics.tracebacks import show_errors
from unisono.errors import CommError
from unisono.launcher.job import Job, check_job, conclude
from unisono.launcher.supervisor import GRACE_S, Outcome
from unisono.simulation import EndedError, TaskScheduler, interposed, unpatched
from unisono.transports import TRANSPORTS
from unisono.transports.sim import SimNetwork
from unisono.wrappers.fault import Faulty, check_faults

__all__ = ["Simulated", "run_simulated", "seed_of", "simulate"]

_SEED = "UNISONO_SEED"


@dataclass(frozen=True, slots=True)
class Simulated:
    """Result of a simulation.

    Attributes:
        results: Each rank's return value; with `on_failure="continue"`, a failed rank's error.
        time_s: Virtual time at which the last rank ended, in seconds.
        seed: The seed.
        trace: The events, one per line. The same seed gives the same trace.
        digest: A hash of the trace.
    """

    results: list[Any]
    time_s: float
    seed: int
    trace: list[str] = field(repr=False)
    digest: str

    def _repr_html_(self) -> str:
        results = {f"rank {rank}": repr(result) for rank, result in enumerate(self.results)}
        return html_table(f"{self.time_s:.6g} virtual seconds, seed {self.seed}", results)


def simulate(
    fn: Callable[..., Any],
    nprocs: int = 2,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    seed: int | None = None,
    network: SimNetwork | None = None,
    faults: Mapping[str, Any] | None = None,
    preempt: float = 0.0,
    timeout: Timeout = 300.0,
    on_failure: Literal["end", "continue"] = "end",
    check: Check = "auto",
    deterministic: bool = False,
    chunk_bytes: int = 2 << 20,
    wrap: Callable[[Transport], Transport] | None = None,
    backend: str = "sim",
) -> Simulated:
    """Run `fn(comm, *args, **kwargs)` on `nprocs` simulated ranks in this process; return results and a trace.

    Exactly one rank runs at a time. Whenever a rank waits, sends a message, or queries the control plane, the seed
    decides which rank runs next. Time is virtual: it advances only while all ranks wait, so timeouts of minutes cost
    nothing. Computations are real. The same seed always gives exactly the same run. In the simulation, `time`,
    `threading` and `queue` are simulated, each rank has its own random generators (torch's, Python's and numpy's), and
    threads that a rank starts are scheduled like ranks.

    If no rank can proceed, every rank immediately raises `DeadlockError`, which says what each rank waits for. A wait
    with a timeout raises `CommTimeoutError` when that timeout expires.

    Args:
        fn: The program of every rank.
        nprocs: Number of ranks.
        args, kwargs: Arguments of `fn`.
        seed: Seed for the scheduling order, the network's jitter and faults. If None, the value of UNISONO_SEED if that
            is set, else 0.
        network: Model of the network, which determines how long messages take; see `unisono.transports.sim.SimNetwork`.
        faults: Arguments for `unisono.testing.Faulty`; if given, each rank's transport is wrapped in `Faulty`, and then
            `wrap` is applied to the wrapped transport.
        preempt: Probability of switching to another rank when a rank acquires a free lock, to expose races in which a
            rank checks something before it acquires the lock.
        timeout, on_failure, check, deterministic, chunk_bytes, wrap: As for `launch`; the timeout is in virtual time.
        backend: "sim", or another transport whose ranks are threads.

    Returns: The results of all ranks, the virtual time, and the trace.

    Raises:
        Exception: The first failing rank's error, with a note that names the seed.
        ValueError, TypeError: An argument is invalid, or names a fault or a rank that does not exist.

    Cost: a few thread switches per message. While a rank waits for something real, such as a process or a socket, all
    ranks stop.

    Example:
        >>> def program(comm):
        ...     t = torch.ones(4) * comm.rank
        ...     comm.all_reduce(t)
        ...     return t.sum().item()
        >>> first, again = (un.simulate(program, 3, seed=7) for _ in range(2))
        >>> first.results, first.time_s < 0.01, first.trace == again.trace
        ([12.0, 12.0, 12.0], True, True)
    """
    show_errors()
    check_job(fn, nprocs, on_failure, chunk_bytes)
    timeout_s = positive_timeout(timeout)
    if not isinstance(preempt, int | float) or not 0 <= preempt <= 1:
        raise ValueError(f"preempt must be a probability from 0 to 1, not {preempt!r}")
    if network is not None and not isinstance(network, SimNetwork):
        raise TypeError(f"network must be a unisono.transports.sim.SimNetwork, not {network!r}")
    if faults is not None:
        check_faults(faults, nprocs)
    transport = TRANSPORTS[backend]
    if not transport.in_process:
        raise ValueError(
            f"ranks of backend {backend!r} are processes, which cannot be simulated; use 'sim' or 'thread'"
        )
    if network is not None:
        if not transport.simulated:
            raise ValueError(f"network= is for backend 'sim', whose messages take time; not for {backend!r}")
        network.check_ranks(nprocs)
    chosen = seed_of(seed)
    whole = wrap if faults is None else partial(_faulty, seed=chosen, faults=dict(faults), wrap=wrap)
    extra = {"network": network or SimNetwork()}
    options = Options(backend, "cpu", timeout_s, chunk_bytes=chunk_bytes, deterministic=deterministic, extra=extra)
    job = Job(fn, tuple(args), dict(kwargs or {}), transport, options, check, whole)
    return run_simulated(job, nprocs, on_failure, chosen, preempt)


def seed_of(given: int | None) -> int:
    """Return the given seed, else $UNISONO_SEED, else 0."""
    text = os.environ.get(_SEED, "0") if given is None else str(given)
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"a seed must be a whole number, not {text!r}; check {_SEED}") from None


def _faulty(
    inner: Transport, seed: int, faults: dict[str, Any], wrap: Callable[[Transport], Transport] | None
) -> Transport:
    faulty = Faulty(inner, seed=seed, **faults)
    return faulty if wrap is None else wrap(faulty)


def run_simulated(job: Job, size: int, on_failure: str, seed: int, preempt: float = 0.0) -> Simulated:
    """Run a job on `size` simulated ranks, and return the result."""
    refuse_green_threads()
    network: SimNetwork = job.options.extra.get("network") or SimNetwork()
    ended: list[Outcome] = []
    # If ranks cannot have their own torch generators, `ThreadRank` seeds the shared one, so restore its state
    # afterwards.
    shared = nullcontext() if OWN_GENERATORS else torch.random.fork_rng(devices=[])
    with unpatched(), own_generators, interposed, shared:
        scheduler = TaskScheduler(seed, job.options.timeout_s, preempt=preempt)
        hubs: list[SimulatedHub] = []
        world = Group.world(0, size)

        def main(rank: int) -> None:
            # Create the hub in the first rank that runs, because only locks created inside the simulation are
            # simulated.
            hub = hubs[0] if hubs else SimulatedHub(network.request_s, network.notice_s)
            hubs[:] = [hub]
            # Use the same seed on all ranks, so that a rank's random numbers do not depend on the order in which ranks
            # run.
            with ThreadRank(seed):
                outcome = _be(job, replace(world, rank=rank), hub)
            scheduler.note("has ended" if outcome.error is None else f"has ended with {type(outcome.error).__name__}")
            ended.append(outcome)
            if outcome.error is not None and on_failure == "end":
                scheduler.at(scheduler.now + int(GRACE_S * 1e9), lambda: _end_all(scheduler, size))

        for rank in range(size):
            scheduler.start(partial(main, rank), f"rank {rank}", rank, main=True)
        scheduler.run()
    for outcome in ended:
        if outcome.error is not None:
            how = f"un.simulate(..., seed={seed}), or {_SEED}={seed}, repeats exactly this run"
            outcome.error.add_note(f"simulated with seed {seed}: {how}")
    results = conclude(ended, size, on_failure)
    digest = blake2b("\n".join(scheduler.trace).encode(), digest_size=16).hexdigest()
    return Simulated(results, scheduler.now / 1e9, seed, scheduler.trace, digest)


def _be(job: Job, group: Group, hub: SimulatedHub) -> Outcome:
    control = hub.control()
    try:
        return Outcome(group.rank, job.run(group, control))
    except EndedError:
        raise
    except BaseException as error:
        return Outcome(group.rank, error=error)
    finally:
        with suppress(CommError):
            control.close()


def _end_all(scheduler: TaskScheduler, size: int) -> None:
    """End all ranks when the grace period after a failure is over."""
    for rank in range(size):
        for task in scheduler.of_rank(rank):
            scheduler.throw(task, EndedError())
