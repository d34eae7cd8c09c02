"""Entry points: `init` lets a running process join a job as a rank, and `launch` starts all ranks of a job."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, get_args

import torch

from unisono import bootstrap
from unisono.bootstrap import Rendezvous
from unisono.communicator import Check, Communicator
from unisono.control.client import SocketControl
from unisono.control.local import LocalHub
from unisono.core.failure import Cause, to_cause
from unisono.core.group import Group
from unisono.core.thread_ranks import ThreadRank, own_generators
from unisono.core.threads import refuse_green_threads
from unisono.core.transport import HEARTBEAT_LEAST_S, Options, Transport
from unisono.core.types import Timeout
from unisono.core.work import positive_timeout
from unisono.diagnostics.tracebacks import show_errors
from unisono.errors import CommError, MismatchError
from unisono.host.native import core_build
from unisono.host.network import (
    address_of,
    host_identity,
    interface_of,
    requested_interface,
    why_no_shm,
)
from unisono.launcher.job import Job, check_chunk_bytes, check_job, conclude
from unisono.launcher.supervisor import Outcome, Supervisor
from unisono.transports import TRANSPORTS
from unisono.transports.hierarchical import transport_named
from unisono.transports.hierarchical.reachability import check_reachability

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from unisono.engines import Engine
    from unisono.launcher.linked_ranks import LinkedRanks

__all__ = [
    "CHUNK_BYTES",
    "HEARTBEAT",
    "OVERRIDE",
    "TIMEOUT_S",
    "Hosts",
    "LaunchOverride",
    "OnFailure",
    "Topology",
    "Wrap",
    "choose_backend",
    "communicator_at",
    "discover",
    "heartbeat_seconds",
    "init",
    "job_of",
    "launch",
    "linked_ranks",
    "network_of",
    "validate_hosts",
]

_log = logging.getLogger("unisono")
_NO_SHM = "unisono: no shared memory between these ranks: %s"

TIMEOUT_S = 300.0
HEARTBEAT = "UNISONO_HEARTBEAT"
"""Environment variable with the heartbeat in seconds, for programs that do not pass `heartbeat`."""
CHUNK_BYTES = 2 << 20
T = TypeVar("T")
Wrap = Callable[[Transport], Transport]
OnFailure = Literal["end", "continue", "replace"]


class LaunchOverride(Protocol):
    """Replaces `init` and `launch` in a process that runs a script outside a job, for example to replay a rank."""

    def communicator(self) -> Communicator:
        """Return the communicator that `init` returns in this process."""
        ...

    def results(self, program: Callable[..., T], args: Sequence[Any], kwargs: Mapping[str, Any], nprocs: int) -> Any:
        """Run the program in place of `launch`, and return the results, which `launch` returns in turn."""
        ...


OVERRIDE: ContextVar[LaunchOverride | None] = ContextVar("unisono launch override", default=None)
"""The current override; None if `launch` and `init` should start and join ranks."""


def init(
    backend: str | None = "auto",
    *,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: Timeout = TIMEOUT_S,
    heartbeat: Timeout | None = None,
    device: str | torch.device | None = None,
    secret: str | bytes | None = None,
    check: Check = "auto",
    deterministic: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
    wrap: Wrap | None = None,
    interface: str | None = None,
) -> Communicator:
    """Join the other ranks of a job, and return the communicator of all ranks.

    The rank, the number of ranks and the rendezvous address come from `init_method` or, if it is None, from the
    environment of torchrun, MPI or Slurm. If `init_method` is None and the environment defines no ranks, this process
    is the only rank. `init` logs how it found the rank and the rendezvous (logger "unisono", level info).

    Args:
        backend: A transport's name, a pair such as "shm+tcp" (the first within a host, the second between hosts), or
            "auto". "auto" chooses nccl if each rank has a GPU, shared memory if all ranks are on one host, tcp if no
            two ranks share a host, and otherwise "shm+tcp". Instead of tcp, "auto" chooses "mpi" under mpirun, and gloo
            if a rank has no native core. The variable UNISONO_BACKEND, set by `unisono run --backend`, replaces "auto".
            None means "auto".
        init_method: "env://" (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), "tcp://host:port" or "file:///path", as in
            torch; the last two need `rank` and `world_size`.
        rank, world_size: This process's rank, and the number of ranks; if None, they are read from the environment.
        timeout: Timeout for joining, and default timeout for every operation, in seconds or as a `datetime.timedelta`.
        heartbeat: Time after which an unresponsive host and its ranks are considered lost, at least 2 s. Errors may
            come earlier: a waiting call's own timeout may be shorter than the heartbeat, and the end of a process is
            detected immediately. Defaults to the variable UNISONO_HEARTBEAT (in seconds; set by
            `unisono run --heartbeat`), or else to the timeout.
        device: Device of this rank's tensors; if None, "cuda:<i>" with nccl, where i is the local rank modulo the
            number of visible GPUs, and "cpu" with other backends.
        secret: Key with which ranks authenticate each other. Defaults to the variable UNISONO_SECRET, or else to this
            user's key file, which the first rank on a host creates (mode 0600).
        check: "auto" compares the ranks' calls before each collective (with nccl, while the collective runs); "off"
            disables this check.
        deterministic: Whether floating-point sums and products are reduced in one fixed order, along a balanced binary
            tree. Each node of the tree splits its ranks into halves; if their sizes differ, the first is larger. The
            result at each node of the tree is rounded to the tensor's dtype. Algorithms that reduce in the fixed order
            give bitwise identical results for every chunk size and on every transport; all other algorithms are
            refused. Fixed-order reduction disables the native core and other native collectives.
        chunk_bytes: Maximum size of the messages into which an algorithm splits a tensor; the same on all ranks.
        wrap: Function that takes the transport and returns a wrapper around it, for tracing or fault injection.
        interface: Network interface, such as "eth0", through which ranks on other hosts reach this rank. Defaults to
            the variable UNISONO_INTERFACE, GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, or else to the interface of the
            route to the first rank. The chosen interface is logged.

    Returns: The communicator of all ranks, which the caller must close, for example with a `with` statement.

    Raises:
        ValueError: The backend, interface or init method is unknown, or `rank` and `world_size` are inconsistent.
        CommTimeoutError: The first rank cannot be reached, or ranks are missing.
        UnavailableError: The backend is not available here; the error says how to install it.

    Example:
        >>> comm = un.init()
        >>> comm.rank, comm.size
        (0, 1)
        >>> comm.close()
    """
    show_errors()
    timeout_s = positive_timeout(timeout)
    heartbeat_s = heartbeat_seconds(heartbeat)
    check_chunk_bytes(chunk_bytes)
    if backend in (None, "auto"):
        backend = os.environ.get("UNISONO_BACKEND") or "auto"
    if backend != "auto":
        transport_named(backend)
    override = OVERRIDE.get()
    if override is not None:
        return override.communicator()
    place = bootstrap.find(init_method, rank, world_size, timeout_s, secret)
    show_errors(place.rank, place.size)
    return communicator_at(
        place,
        backend,
        device=device,
        timeout_s=timeout_s,
        check=check,
        deterministic=deterministic,
        chunk_bytes=chunk_bytes,
        wrap=wrap,
        interface=interface,
        heartbeat_s=heartbeat_s,
    )


def communicator_at(
    place: Rendezvous,
    backend: str,
    *,
    device: str | torch.device | None,
    timeout_s: float,
    check: Check,
    deterministic: bool,
    chunk_bytes: int,
    wrap: Wrap | None,
    interface: str | None = None,
    hosts: Hosts | None = None,
    heartbeat_s: float | None = None,
) -> Communicator:
    """Connect the ranks that have met at a rendezvous, and return their communicator.

    Closing the communicator also closes the rendezvous, and so does an error in this function.

    Args:
        place: The rendezvous.
        backend: A backend's name, as for `init`, except that UNISONO_BACKEND is ignored.
        timeout_s, heartbeat_s: Like `timeout` and `heartbeat` of `init`, but in seconds.
        hosts: Ranks on each host, assumed without a check; if None, they are detected.
        device, check, deterministic, chunk_bytes, wrap, interface: As for `init`.

    Raises:
        CommError, ValueError: As for `init`.
    """
    try:
        around = discover(place, interface, timeout_s, backend)
        sharing = hosts or around.sharing
        chosen = choose_backend(sharing, gpus=around.gpus, network=place.network or around.network)
        name = chosen if backend == "auto" else backend
        _check_backends([chosen if other == "auto" else other for other in around.backends])
        local_rank = around.number_here(place.rank) if place.local_rank is None else place.local_rank
        options = Options(
            name,
            _device(name, device, local_rank),
            timeout_s,
            around.address,
            chunk_bytes,
            deterministic=deterministic,
            hosts=sharing if backend == "auto" else hosts,
            heartbeat_s=heartbeat_s,
        )
        _log.info("unisono: %s, backend %s, reached at %s (%s)", place.source, name, around.address, around.interface)
        kind = transport_named(name)
        if kind.in_process and place.size > 1:
            raise ValueError(
                f"ranks of backend {name!r} live in one process: start them with launch(fn, {place.size}, {name!r})"
            )
        around.prepare(name, place, timeout_s)
        transport = kind.connect(Group.world(place.rank, place.size, place.name), place.control, options)
        comm = Communicator(wrap(transport) if wrap else transport, place.control, options, check=check)
    except BaseException as error:
        # Report the reason to ranks that are waiting for this one; otherwise they would only see that this rank has
        # disconnected.
        world = Group.world(place.rank, place.size, place.name)
        place.control.report_failure(world, to_cause(error, place.rank, "init"))
        place.close()
        if isinstance(error, CommError):
            error.locate(rank=place.rank, size=place.size, operation="init")
        raise
    comm.after_close(place.close)
    return comm


def launch(
    fn: Callable[..., T],
    nprocs: int = 2,
    backend: str | None = "auto",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    timeout: Timeout = TIMEOUT_S,
    heartbeat: Timeout | None = None,
    on_failure: OnFailure = "end",
    check: Check = "auto",
    device: str | torch.device | None = None,
    threads: int | None = None,
    deterministic: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
    wrap: Wrap | None = None,
    hosts: Sequence[Sequence[int]] | None = None,
    seed: int | None = None,
    on: Executor | Engine | str | None = None,
) -> list[T]:
    """Run `fn(comm, *args, **kwargs)` on `nprocs` ranks of this host, and return each rank's result.

    Ranks are processes forked from a forkserver that has imported torch; the first rank starts in about 1 s, and each
    further rank in 0.05 s. With backend "thread" or "sim", ranks are threads of this process (see `simulate` for
    "sim"). `launch` works in scripts (under `if __name__ == "__main__":`), in `python -`, in tests and in notebooks:
    functions that a process cannot import are sent by value. With `on`, ranks run on the workers of an executor, on
    this host or other hosts.

    Args:
        fn: Function that every rank runs.
        nprocs: Number of ranks.
        backend: A transport's name. "auto" and None mean nccl if each rank has a GPU, and otherwise shared memory
            ("tcp" if the platform does not support it).
        args, kwargs: Arguments of `fn`; pickled for ranks that are processes.
        timeout: Default timeout of each of the communicator's operations (seconds or a `timedelta`), not of the whole
            run.
        on_failure: With "end", after a rank raises an exception, all other ranks have 3 s to fail with their own error,
            and are then killed; `launch` raises the first error with that rank's traceback. With "continue", `launch`
            returns the survivors' results, and a failed rank's entry is its error. "replace" is like "end", except that
            a rank is started again if its process or host is lost. A restarted rank calls `fn` with a communicator that
            contains only itself, and joins the other ranks through `un.elastic.Recovery` or `comm.rebuild`, while they
            wait in `recover(size=...)` or `rebuild(size=...)`. The job ends if two consecutive replacements of a rank
            are lost before they have joined. "replace" works with processes on this host, Ray and Dask.
        heartbeat, check, device, deterministic, chunk_bytes, wrap: As for `init`.
        threads: Number of torch threads per rank; if None, OMP_NUM_THREADS, or else an equal share of the cores.
        hosts: Groups of ranks to treat as if each were on a separate host, such as `[[0, 1], [2, 3]]`, to test
            multi-host programs on one host.
        seed: Seed for the scheduling order, for backend "sim" only. Defaults to UNISONO_SEED, or else to 0.
        on: An engine's name ("ray", "dask", "submitit" or "mpi"), an engine with options, such as
            `un.engines.Ray(num_cpus=2)`, or an executor with the interface of `concurrent.futures` whose workers are
            processes, such as a `ProcessPoolExecutor`. `nprocs` single-threaded workers must become free within
            `timeout`. With `on`, backend "auto" makes the same choice as in `init`, based on the workers' hosts. When a
            rank ends, its worker process is restored to its previous state. With Dask, MPI or an executor, ranks cannot
            be killed after another rank's failure: each rank runs until its next call on the communicator, which raises
            an error. None and "local" mean processes on this host.

    Returns: The result of `fn` on each rank, in rank order.

    Raises:
        Exception: The first failing rank's error.
        PeerLostError: A rank's process ended without reporting (the error names the signal or exit code), or called
            `sys.exit`.
        CommTimeoutError: The executor did not start all ranks within `timeout`; the error says how many it started.
        TypeError: `on` is neither an engine nor an executor whose workers are processes.
        UnavailableError: The engine is not installed; the error says how to install it.

    Example:
        >>> un.launch(lambda comm, x: comm.rank * x, nprocs=3, backend="thread", args=(10,))
        [0, 10, 20]
    """
    show_errors()
    timeout_s = positive_timeout(timeout)
    heartbeat_s = heartbeat_seconds(heartbeat)
    check_job(fn, nprocs, on_failure, chunk_bytes, get_args(OnFailure))
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        raise ValueError(f"threads must be a positive int, not {threads!r}")
    given = validate_hosts(hosts, nprocs)
    override = OVERRIDE.get()
    if override is not None:
        results: list[T] = override.results(fn, args, kwargs or {}, nprocs)
        return results
    engine = None
    if on is not None:
        from unisono.launcher.engines import resolve

        engine = resolve(on)
    if engine is not None:
        from unisono.launcher.engine_rank import Program
        from unisono.launcher.engines import run_on

        if seed is not None:
            raise ValueError("only simulated ranks have a seed: use backend 'sim' without on=")
        name = backend or "auto"
        connect = partial(
            communicator_at,
            backend=name,
            device=device,
            timeout_s=timeout_s,
            check=check,
            deterministic=deterministic,
            chunk_bytes=chunk_bytes,
            wrap=wrap,
            hosts=given,
            heartbeat_s=heartbeat_s,
        )
        options = Options(name, _device(name, device), timeout_s, chunk_bytes=chunk_bytes, heartbeat_s=heartbeat_s)
        program = Program(fn, tuple(args), dict(kwargs or {}), connect, options, wrap, threads)
        return conclude(run_on(engine, program, nprocs, on_failure), nprocs, on_failure)
    job = job_of(
        fn,
        nprocs,
        backend,
        args,
        kwargs,
        timeout=timeout,
        heartbeat=heartbeat,
        check=check,
        device=device,
        deterministic=deterministic,
        chunk_bytes=chunk_bytes,
        wrap=wrap,
        hosts=given,
    )
    return _run(job, nprocs, on_failure, threads, seed)


def job_of(
    fn: Callable[..., Any],
    nprocs: int,
    backend: str | None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    timeout: Timeout = TIMEOUT_S,
    heartbeat: Timeout | None = None,
    check: Check = "auto",
    device: str | torch.device | None = None,
    deterministic: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
    wrap: Wrap | None = None,
    hosts: Sequence[Sequence[int]] | None = None,
) -> Job:
    """Return the job that `launch`, given the same arguments, would run on this host."""
    timeout_s = positive_timeout(timeout)
    given = validate_hosts(hosts, nprocs)
    sharing = given or (tuple(range(nprocs)),)
    obstacle = why_no_shm()
    if obstacle is not None:
        sharing = tuple((rank,) for rank in range(nprocs))
        _log.info(_NO_SHM, obstacle)
    chosen = None if backend == "auto" else backend
    network = network_of([core_build()])
    name = chosen or choose_backend(sharing, gpus=torch.cuda.device_count() >= nprocs, network=network)
    options = Options(
        name,
        _device(name, device),
        timeout_s,
        chunk_bytes=chunk_bytes,
        deterministic=deterministic,
        hosts=given,
        heartbeat_s=heartbeat_seconds(heartbeat),
    )
    return Job(fn, tuple(args), dict(kwargs or {}), transport_named(name), options, check, wrap)


def heartbeat_seconds(heartbeat: Timeout | None) -> float | None:
    """Return the given heartbeat, else $UNISONO_HEARTBEAT, in seconds; None if neither is set.

    Raises:
        ValueError: The heartbeat is not a number, or is shorter than the minimum that kernels support.
    """
    name = HEARTBEAT if heartbeat is None else "heartbeat"
    given = os.environ.get(HEARTBEAT) or None if heartbeat is None else heartbeat
    if given is None:
        return None
    try:
        seconds = positive_timeout(float(given) if isinstance(given, str) else given, name)
    except ValueError as error:
        raise ValueError(f"{name} is {given!r}: {error}") from None
    if seconds < HEARTBEAT_LEAST_S:
        raise ValueError(f"{name} must be at least {HEARTBEAT_LEAST_S:g} s, not {seconds:g}")
    return seconds


def _run(job: Job, nprocs: int, on_failure: OnFailure, threads: int | None, seed: int | None) -> list[Any]:
    """Run a job with the kind of ranks that its transport needs: simulated ranks, threads or processes."""
    if on_failure == "replace" and (job.transport.in_process or job.transport.launcher == "mpirun"):
        raise ValueError(
            f"on_failure='replace' starts lost processes again, and ranks of backend {job.options.backend!r} are none, "
            "or are started together: leave out backend=, or use on='ray' or on='dask'"
        )
    if job.transport.simulated:
        from unisono.launcher.simulated import run_simulated, seed_of

        return run_simulated(job, nprocs, on_failure, seed_of(seed)).results
    if seed is not None:
        raise ValueError(f"only simulated ranks have a seed: use backend 'sim', not {job.options.backend!r}")
    if job.transport.in_process:
        ended = _run_threads(job, nprocs, on_failure)
    else:
        with linked_ranks(job, nprocs, on_failure, threads) as ranks:
            ended = ranks.run()
    return conclude(ended, nprocs, on_failure)


def linked_ranks(job: Job, nprocs: int, on_failure: str, threads: int | None) -> LinkedRanks:
    """Return a job's ranks as processes, which mpirun starts if the transport requires it."""
    if job.transport.launcher == "mpirun":
        from unisono.launcher.mpirun import MpirunRanks

        return MpirunRanks(job, nprocs, on_failure, threads)
    from unisono.launcher.processes import ProcessRanks

    return ProcessRanks(job, nprocs, on_failure, threads)


def _device(backend: str, device: str | torch.device | None, local_rank: int | None = None) -> str:
    if device is not None or backend != "nccl":
        return "cpu" if device is None else str(device)
    # A launcher may make only one GPU visible to each rank, so take the local rank modulo the number of visible GPUs.
    return "cuda" if local_rank is None else f"cuda:{local_rank % max(1, torch.cuda.device_count())}"


Hosts = tuple[tuple[int, ...], ...]
"""The ranks on each host."""

_BY_ADDRESS = ("tcp", "gloo", "nccl", "ucc", "xccl")


def _check_backends(names: Sequence[str]) -> None:
    """Raise `MismatchError` on every rank if ranks chose different backends; otherwise, they would hang."""
    if len(set(names)) > 1:
        quoted = "; ".join(f"rank {rank}: {name!r}" for rank, name in enumerate(names))
        raise MismatchError(
            f"ranks use different backends ({quoted}). Pass the same backend= on all ranks, and set UNISONO_BACKEND, "
            "which replaces 'auto', for all or none"
        )


@dataclass(frozen=True, slots=True)
class Topology:
    """Where the job's ranks run, and how they can reach each other; see `discover`.

    Attributes:
        hosts: Ranks on each host; ranks on one host share a kernel and network.
        sharing: Sets of ranks that have verified that they can share memory with each other.
        gpus: Whether each rank has a GPU to itself.
        network: Backend to use between hosts.
        address: Address at which other hosts can reach this host.
        interface: Network interface that has `address`, and the reason why it was chosen, for the log.
        backends: Backend that each rank passed.
    """

    hosts: Hosts
    sharing: Hosts
    gpus: bool
    network: str
    address: str
    interface: str
    backends: tuple[str, ...] = ()

    def number_here(self, rank: int) -> int:
        """Return the rank's number on its host, from 0.

        Example:
            >>> halves = ((0, 2), (1, 3))
            >>> Topology(halves, halves, gpus=True, network="tcp", address="", interface="").number_here(3)
            1
        """
        return next(ranks.index(rank) for ranks in self.hosts if rank in ranks)

    def prepare(self, backend: str, place: Rendezvous, timeout: float) -> None:
        """Prepare a backend for several hosts: check that hosts can reach each other, and set NCCL's network interface.

        Raises:
            CommError: Hosts cannot connect to each other; the error is raised on every rank, and names the hosts, the
                address, and the setting to change.
        """
        _, _, outer = backend.rpartition("+")
        if len(self.hosts) == 1 or outer not in _BY_ADDRESS:
            return
        name = interface_of(self.address)
        if outer == "nccl" and name is not None:
            # NCCL_SOCKET_IFNAME is the only way to choose NCCL's network interface; without the variable, NCCL picks an
            # interface itself.
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
        check_reachability(
            Group.world(place.rank, place.size, place.name), place.control, self.hosts, self.address, timeout
        )


def discover(place: Rendezvous, interface: str | None, timeout: float, backend: str = "auto") -> Topology:
    """Return the topology, which all ranks determine together over the control plane.

    Args:
        place: This rank's rendezvous.
        interface: Network interface for incoming connections; if None, the interface in the environment, or else the
            interface through which this rank reached rank 0.
        timeout: Seconds to wait for the other ranks.
        backend: This rank's backend, or "auto".

    Raises:
        ValueError: The requested interface does not exist on this host, or has no address.
    """
    wanted = requested_interface(interface)
    address = place.address if wanted is None else address_of(*wanted)
    why = "by the route to the first rank" if wanted is None else f"by {wanted[1]}"
    if place.size == 1:
        alone = ((0,),)
        return Topology(alone, alone, torch.cuda.device_count() > 0, "tcp", address, f"{interface_of(address)} {why}")
    group = Group.world(place.rank, place.size, place.name)
    selected = bool(os.environ.get("CUDA_VISIBLE_DEVICES"))
    facts = host_identity(), torch.cuda.device_count(), why_no_shm(), core_build(), selected, backend
    all_facts = place.control.exchange(group, "surroundings", facts, timeout)
    names, counts, obstacles, builds, selections, backends = zip(*all_facts, strict=True)
    if isinstance(place.control, SocketControl):
        found = place.control.address_for_all(group, timeout)
        address = found if wanted is None else address
    device_name = interface_of(address) if wanted is None else wanted[0]
    hosts = tuple(tuple(r for r, name in enumerate(names) if name == host) for host in dict.fromkeys(names))
    obstacle = next(filter(None, obstacles), None)
    if obstacle is not None:
        _log.info(_NO_SHM, obstacle)
    sharing = TRANSPORTS["shm"].shm_peers(group, place.control, timeout)
    gpus = all(count >= names.count(name) for name, count in zip(names, counts, strict=True))
    if not gpus and all(counts) and all(selections):
        # Engines and Slurm may make only one GPU visible to each rank, and this GPU is then number 0 on every rank.
        # Compare the GPUs' UUIDs to see whether they differ; this initializes CUDA.
        number = names[: place.rank].count(names[place.rank]) if place.local_rank is None else place.local_rank
        seen = torch.cuda.get_device_properties(number % torch.cuda.device_count()).uuid
        gpus = len(set(place.control.exchange(group, "GPUs", str(seen), timeout))) == place.size
    network = network_of(builds)
    return Topology(hosts, sharing, gpus, network, address, f"{device_name} {why}", backends)


def network_of(builds: Sequence[str]) -> str:
    """Return the backend to use between hosts, given the ranks' builds of the native core.

    Example:
        >>> network_of(["a1", "a1"]), network_of(["a1", ""])
        ('tcp', 'gloo')
    """
    if "" in builds:
        _log.info("unisono: no tcp, but gloo: rank %d has no native core", builds.index(""))
    elif len(set(builds)) > 1:
        _log.info("unisono: no tcp, but gloo: ranks have different builds of the native core")
    else:
        return "tcp"
    return "gloo"


def choose_backend(hosts: Hosts, *, gpus: bool, network: str = "tcp") -> str:
    """Return the backend for "auto". `hosts` are the sets of ranks that share memory.

    The backend is the first that applies: nccl if each rank has a GPU, threads if there is only one rank, shared memory
    if all ranks share it, the network backend if no two ranks share memory, or shared memory within hosts and the
    network backend between them.

    Example:
        >>> [choose_backend(hosts, gpus=False) for hosts in (((0, 1),), ((0, 1), (2,)), ((0,), (1,)))]
        ['shm', 'shm+tcp', 'tcp']
    """
    size = sum(len(ranks) for ranks in hosts)
    if gpus and torch.cuda.is_available() and torch.distributed.is_nccl_available():
        return "nccl"
    if size == 1:
        return "thread"
    if len(hosts) == 1:
        return "shm"
    return network if len(hosts) == size else f"shm+{network}"


def validate_hosts(hosts: Sequence[Sequence[int]] | None, size: int) -> Hosts | None:
    """Validate the hosts that a caller passed, and return them as tuples.

    Raises:
        ValueError: A rank is repeated, does not exist, or is missing.
    """
    if hosts is None:
        return None
    given = tuple(tuple(ranks) for ranks in hosts)
    if sorted(rank for ranks in given for rank in ranks) != list(range(size)) or not all(given):
        raise ValueError(f"hosts must name each of the ranks 0 to {size - 1} once, not {[list(r) for r in given]}")
    return given


def _run_threads(job: Job, size: int, on_failure: str) -> list[Outcome]:
    """Run a job on `size` threads; return the outcomes in the order in which the ranks ended.

    A thread cannot be killed from outside. A thread that does not end within the grace period after a failure is
    abandoned as a daemon thread.
    """
    refuse_green_threads()
    hub = LocalHub()
    done = queue.SimpleQueue[Outcome]()

    def main(rank: int) -> None:
        with ExitStack() as stack:
            try:
                control = hub.control()
                stack.callback(control.close)
                with ThreadRank():
                    result = job.run(Group.world(rank, size), control)
                outcome = Outcome(rank, result)
            except BaseException as error:
                # Report errors outside the program, too: `launch` waits for an outcome of each rank.
                outcome = Outcome(rank, error=error)
            # Report before the handle is closed, which waits for the hub.
            done.put(outcome)

    def start(rank: int, attempt: int) -> None:
        threading.Thread(target=main, args=(rank,), name=f"unisono rank {rank}", daemon=True).start()

    def ends(limit_s: float | None) -> list[Outcome]:
        with suppress(queue.Empty):
            return [done.get(timeout=limit_s)]
        return []

    try:
        with own_generators:
            return Supervisor(start, ends, range(size), on_failure).run()
    except BaseException as error:
        # The caller was interrupted, so nothing waits for the ranks any more. Fail the ranks' group, so that each rank
        # ends at its next call.
        cause = Cause("AbortedError", None, f"launch was ended by {type(error).__name__}")
        hub.control().report_failure(Group.world(0, size), cause)
        raise
