"""The torch.distributed environment of a rank in a test: its own groups and environment variables.

Ranks may be threads of this process. While a test runs on such ranks, per-process state of torch and Python becomes
per-thread: torch's table of groups, its registry of their names, and RANK and the other environment variables of
torchrun. A thread started by a rank belongs to that rank. Ranks that are processes get the same groups and rank numbers
as ranks that are threads.
"""

from __future__ import annotations

import functools
import itertools
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported early, because its functions capture the default group that exists at import

# This function is missing from torch's type annotations.
from torch._C._distributed_c10d import _set_thread_isolation_mode  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d

from unisono.communicator import Communicator, engine_of, join_part
from unisono.control.torch_store import ControlStore
from unisono.core.shared_context import Replacement, SharedContext, replaced
from unisono.core.thread_ranks import here
from unisono.errors import UnavailableError
from unisono.interop.from_store import JoinedGroup
from unisono.interop.group import UnisonoGroup
from unisono.interop.options import GroupOptions
from unisono.testing.pools import RankPool
from unisono.transports.hierarchical import transport_named

__all__ = ["run_with_torch"]

_BACKEND = "unisono_test"
"""Name of the backend that replaces gloo and unisono in the tested code."""
_PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_runs = itertools.count()
"""Numbers for runs on processes. They make group names unique, because the control plane keeps names between runs."""


_MAPS = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")
# Torch's class defines these attributes as properties that return the process's maps, so override them.
_Maps: Any = type("_Maps", (type(distributed_c10d._world),), {**dict.fromkeys(_MAPS), "group_count": 0})


class _RankWorld(_Maps):  # type: ignore[misc]
    """Torch's table of groups, for one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__.update({name: {} for name in _MAPS})
        self._default: dist.ProcessGroup | None = None
        self.given: dist.ProcessGroup | None = None

    @property
    def default_pg(self) -> dist.ProcessGroup | None:
        # The tested code may create the default group itself, as under torchrun; its group then replaces the group
        # provided for the test.
        given = self.given
        if given is not None and sys._getframe(3).f_code.co_name == "init_process_group":
            self.given = None
            if given is self._default:
                dist.destroy_process_group()
        return self._default

    @default_pg.setter
    def default_pg(self, group: dist.ProcessGroup | None) -> None:
        self._default = group


class _ThreadWorld:
    """Replacement for torch's table of groups: each rank sees its own table; other threads see the process's table."""

    def __init__(self, process: Any) -> None:
        self.__dict__["_process"] = process

    def _seen(self) -> Any:
        rank = _thread.rank
        return self._process if rank is None else rank.world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._seen(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._seen(), name, value)


class _TorchRank:
    """One rank of a running test.

    Args:
        comm: The rank's communicator, from which its groups derive.
        meeting: Address and port of the rendezvous, as torchrun sets them in the environment.
        timeout_s: Maximum time that an operation waits, in seconds.
        run: Number of the run, which is part of group names.
    """

    def __init__(self, comm: Communicator, meeting: dict[str, str], timeout_s: float, run: int) -> None:
        rank = str(comm.rank)
        size = str(comm.size)
        self.comm = comm
        self.place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, **meeting}
        self.timeout_s = timeout_s
        self.process = os.getpid()
        self.world = _RankWorld()
        self._run = run
        self._made: Counter[tuple[int, ...]] = Counter()
        self._comms: list[Communicator] = []
        # Keeps stores alive, because torch's C++ code refers only to the C++ part of a store.
        self._stores: list[ControlStore] = []

    def store(self) -> ControlStore:
        """Return a store for a new default group."""
        engine = engine_of(self.comm)
        name = f"torch/{engine.group.name}/{self._run}.{len(self._stores)}"
        self._stores.append(ControlStore(engine.control, name, self.timeout_s, engine.group))
        return self._stores[-1]

    def connect(self, ranks: Sequence[int], timeout_s: float) -> JoinedGroup:
        """Join a new group of the given ranks. Unlike `Communicator.subgroup`, only the group's members call this."""
        engine = engine_of(self.comm)
        members = tuple(ranks)
        self._made[members] += 1
        again = self._made[members]
        name = f"torch{self._run or ''}/ranks {','.join(map(str, members))}{f' #{again}' if again > 1 else ''}"
        group = engine.group.child(name, members)
        comm = join_part(self.comm, group, "auto", replace(engine.options, timeout_s=timeout_s))
        comm.allow_any_thread()
        self._comms.append(comm)
        return JoinedGroup(comm, engine.control, group)

    def fail(self, error: BaseException) -> None:
        """Report this rank's final error to all its groups, so that their other ranks do not wait for this rank."""
        for comm in self._comms:
            comm.__exit__(type(error), error, error.__traceback__)


class _RankOfThread:
    """Finds the rank to which the current thread belongs, or, if ranks are processes, the rank of this process."""

    process: _TorchRank | None = None

    @property
    def rank(self) -> _TorchRank | None:
        thread_rank = here()
        return self.process if thread_rank is None else thread_rank.world


_thread = _RankOfThread()


def run_with_torch(ranks: RankPool, program: Callable[[Communicator], Any], timeout_s: float) -> list[Any]:
    """Return the result of `program(comm)` on each rank, run with torch's default process group.

    Args:
        ranks: The ranks.
        program: As for `RankPool.run`.
        timeout_s: Maximum time that an operation waits, in seconds, even in groups with a longer timeout.

    Raises:
        UnavailableError: This build of torch has no torch.distributed.
        Exception: As for `RankPool.run`.
    """
    in_process = transport_named(ranks.backend).in_process
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    run = 0 if in_process else next(_runs)

    # `wraps` copies the name of the test's module, which determines how the function is pickled.
    @functools.wraps(program)
    def on_rank(comm: Communicator) -> Any:
        return _on_rank(_TorchRank(comm, meeting, timeout_s, run), program)

    with _installed(threads=True) if in_process else nullcontext():
        return ranks.run(on_rank)


def _on_rank(rank: _TorchRank, program: Callable[[Communicator], Any]) -> Any:
    """Run a program on one rank."""
    if transport_named(rank.comm.backend).in_process:
        thread_rank = here()
        assert thread_rank is not None
        thread_rank.world = rank
        return _with_default_group(rank, program)
    with _installed(threads=False), patch.dict(os.environ, rank.place), patch.object(_thread, "process", rank):
        return _with_default_group(rank, program)


def _with_default_group(rank: _TorchRank, program: Callable[[Communicator], Any]) -> Any:
    try:
        dist.init_process_group("gloo")
        rank.world.given = rank.world.default_pg
        result = program(rank.comm)
    except BaseException as error:
        rank.fail(error)
        # Errors from destroying a group must not replace the error that ended the rank.
        with suppress(Exception):
            _leave()
        raise
    _leave()
    return result


def _leave() -> None:
    """Destroy the groups that the tested code left open."""
    if dist.is_initialized():
        dist.destroy_process_group()


# -- replacements while a test runs ------------------------------------------------------------
@contextmanager
def _installed(*, threads: bool) -> Iterator[None]:
    """Context in which a test's ranks have their own environment. `threads`: Whether ranks are threads."""
    if _BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(_BACKEND, _create, extended_api=True, devices=["cpu"])
    with _in_torch, _in_threads if threads else nullcontext():
        yield


@contextmanager
def _torch_replaced() -> Iterator[None]:
    hook = sys.excepthook
    try:
        with replaced(_of_torch()):
            yield
    finally:
        # The creation of each default group has wrapped the exception hook, so restore the original hook.
        sys.excepthook = hook


@contextmanager
def _isolated() -> Iterator[None]:
    """Context in which torch's C++ code looks up groups per thread."""
    _set_thread_isolation_mode(True)
    try:
        with replaced(_of_threads()):
            yield
    finally:
        _set_thread_isolation_mode(False)


_in_torch = SharedContext(_torch_replaced)
_in_threads = SharedContext(_isolated)


def _of_torch() -> list[Replacement]:
    real_rendezvous = distributed_c10d.rendezvous
    real_map: Any = distributed_c10d.BackendConfig.get_device_backend_map

    def rendezvous(url: str, rank: int = -1, world_size: int = -1, **options: Any) -> Iterator[Any]:
        here = _thread.rank
        if here is None:
            yield from real_rendezvous(url, rank, world_size, **options)
            return
        for name, given, own in (("rank", rank, here.comm.rank), ("world_size", world_size, here.comm.size)):
            if given not in (-1, own):
                raise ValueError(f"init_process_group was given {name}={given}, but the test gives this rank {own}")
        yield here.store(), here.comm.rank, here.comm.size

    def device_backends(config: Any) -> dict[str, str]:
        found: dict[str, str] = real_map(config)
        # Replace only gloo and unisono; keep any other backend that the tested code chooses.
        served = found.get("cpu") in ("gloo", "unisono")
        return {"cpu": _BACKEND} if served and _thread.rank is not None else found

    return [
        (distributed_c10d, "_world", _ThreadWorld(distributed_c10d._world)),
        (distributed_c10d, "rendezvous", rendezvous),
        (distributed_c10d.BackendConfig, "get_device_backend_map", device_backends),
    ]


def _create(description: Any, options: object = None) -> UnisonoGroup:
    """Create this rank's object for a group that torch describes, and of which the rank is a member."""
    rank = _thread.rank
    assert rank is not None
    members = description.global_ranks_in_group or range(rank.comm.size)

    def connect(store: dist.Store, number: int, size: int, timeout_s: float, options: GroupOptions) -> JoinedGroup:
        return rank.connect(members, timeout_s)

    timeout = min(description.timeout, timedelta(seconds=rank.timeout_s))
    return UnisonoGroup(
        description.store,
        description.group_rank,
        description.group_size,
        timeout,
        GroupOptions(),
        others_options=options,
        connect=connect,
    )


def _of_threads() -> list[Replacement]:
    profilers = [(torch.autograd.profiler.profile, "__enter__"), (torch.profiler.profile, "start")]
    return [
        (os, "environ", _Environment(os.environ)),
        *((owner, name, _refused(owner, name)) for owner, name in profilers),
    ]


_PROFILES = (
    "starts the profiler of all ranks, which are threads of one process here, and torch ends a process that starts it "
    "twice; use backend='process'"
)


def _refused(owner: type, name: str) -> Callable[..., Any]:
    """Wrap a profiler's method to reject calls from a rank that shares its process with other ranks."""
    real = getattr(owner, name)

    @functools.wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        rank = _thread.rank
        # A process forked by a rank, such as a DataLoader worker, shares nothing with other ranks.
        if rank is not None and rank.comm.size > 1 and rank.process == os.getpid():
            shown = f"{owner.__module__}.{owner.__qualname__}"
            raise UnavailableError(f"{shown} {_PROFILES}", rank=rank.comm.rank, size=rank.comm.size)
        return real(*args, **kwargs)

    return call


class _Environment(os._Environ[str]):
    """Environment variables: RANK and the other variables in `_PLACE` are per rank; all others are the process's."""

    def __init__(self, process: os._Environ[str]) -> None:
        vars(self).update(vars(process))
        self._process = process

    def _of(self, name: str) -> MutableMapping[str, str]:
        if name not in _PLACE:
            return self._process
        rank = _thread.rank
        if rank is not None:
            return rank.place
        # Pytest's `monkeypatch` restores a rank's variables after that rank has ended, on a thread without a rank.
        return self._process if os.environ is self else {}

    def __getitem__(self, name: str) -> str:
        return self._of(name)[name]

    def __setitem__(self, name: str, value: str) -> None:
        self._of(name)[name] = value

    def __delitem__(self, name: str) -> None:
        del self._of(name)[name]

    def __iter__(self) -> Iterator[str]:
        rank = _thread.rank
        if rank is None:
            return iter(self._process)
        return itertools.chain([name for name in self._process if name not in _PLACE], list(rank.place))

    def __len__(self) -> int:
        return sum(1 for _ in self)
