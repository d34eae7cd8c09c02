"""Ranks that are threads: which rank a thread belongs to, and each rank's random generators.

A process has one default generator each for torch, Python and numpy. While ranks are threads, each default generator is
replaced with a Python object that forwards to the calling rank's generator. The Python object suffices for code that
calls a generator's methods (`torch.manual_seed`, `fork_rng`, activation checkpointing), but torch's operators look up
the generator in C++. So the aten operators that accept a generator are intercepted in the dispatcher. On the CPU, an
operator that is called without a generator, or with the default one, gets the calling rank's generator. When the last
rank exits, the original generators and operators are restored.
"""

from __future__ import annotations

import functools
import importlib
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType, TracebackType
from typing import Any

import torch

from unisono.core.shared_context import Replacement, SharedContext, replaced
from unisono.core.threads import DaemonThreadPool
from unisono.errors import UnavailableError

__all__ = ["OWN_GENERATORS", "ThreadRank", "generator_operators", "here", "own_generators"]

# Typed as `Any`, because torch's annotations lack the functions that are used below.
_c: Any = torch._C
OWN_GENERATORS = all(
    hasattr(_c, f"_dispatch_{name}")
    for name in ("get_all_op_names", "has_kernel_for_dispatch_key", "keyset_full_after")
)
"""Whether torch supports a generator for each rank, which needs private functions of torch."""

_REFUSED = ("manual_seed", "seed", "set_state")
_WHY_REFUSED = (
    "sets one generator for all ranks, which are threads of one process here, and this torch cannot give each its own. "
    "Make a generator and pass it on, or use processes as ranks"
)
_default: Any = torch.random.default_generator


class ThreadRank:
    """State of a rank that is a thread.

    A thread that enters a `ThreadRank` as a context manager, and any threads started from it, belong to the rank.

    Args:
        seed: Seed for the generators; None for a random seed, as in a new process.

    Attributes:
        torch, python, numpy: The rank's random generators; numpy's is None without numpy.
        world: The rank's torch.distributed state, which tests store here.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.torch: torch.Generator = torch.Generator() if OWN_GENERATORS else _default
        if seed is not None:
            self.torch.manual_seed(seed & (2**63 - 1))
        elif OWN_GENERATORS:
            self.torch.seed()
        self.python: random.Random = random.Random(seed)
        numpy = _numpy_random()
        self.numpy: Any = numpy and numpy.RandomState(None if seed is None else seed & (2**32 - 1))
        self.world: Any = None

    def __enter__(self) -> None:
        own_generators.__enter__()
        _belong(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _belong(None)
        own_generators.__exit__(kind, error, trace)


class _Thread(threading.local):
    rank: ThreadRank | None = None


_thread = _Thread()


def here() -> ThreadRank | None:
    """Return the rank that this thread belongs to; None if it doesn't belong to a thread rank."""
    return _thread.rank


def _belong(rank: ThreadRank | None) -> None:
    _thread.rank = rank
    # Keep backward passes in the rank's own thread: autograd's threads, which run hooks and recomputation, would belong
    # to no rank.
    torch.autograd.set_multithreading_enabled(rank is None)


@contextmanager
def _overridden() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    try:
        operators = generator_operators() if OWN_GENERATORS else []
        for operator in operators:
            library.impl(operator, _given_a_generator(operator), "BackendSelect", with_keyset=True)
        # Keep the functions until the next registration. Otherwise, `_destroy` would free them while a thread that
        # belongs to no rank may still be waiting for the GIL to run one of them.
        keep = getattr(torch.library, "get_kernel", None)
        _kept[:] = [keep(operator, "BackendSelect") for operator in operators if keep is not None]
        with replaced([*_of_torch(), *_of_python(), *_of_numpy(), *_of_threads()]):
            yield
    finally:
        library._destroy()


_kept: list[Any] = []
own_generators: SharedContext = SharedContext(_overridden)
"""Context for ranks with separate generators. Launchers of ranks also enter it, so that it is set up only once."""


_held: list[Any] = []
"""Locks that the forking thread holds."""


def _before_fork() -> None:
    """Until the fork is done, hold the locks that `torch.manual_seed` takes.

    If another rank held a lock of `torch.manual_seed` during the fork, nobody would ever release the lock in the child,
    where a DataLoader's worker begins by calling `torch.manual_seed`.
    """
    if here() is None:
        return
    devices = [getattr(torch, name, None) for name in ("cuda", "xpu", "mtia")]
    locks = [lock for device in devices if (lock := getattr(device, "_initialization_lock", None)) is not None]
    for lock in locks:
        lock.acquire()
    _held.extend(locks)


def _after_fork() -> None:
    while _held:
        _held.pop().release()


def _in_child() -> None:
    """After a fork, release the locks, and reseed the rank's Python generator, as Python does with its own."""
    _after_fork()
    own_generators.renew_lock()
    rank = here()
    if rank is not None:
        rank.python.seed()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)


# -- torch -----------------------------------------------------------------------------------------
class _DefaultGenerator(torch.Generator):
    """Replaces torch's default generator, including when it is passed to operators."""

    def __getattribute__(self, name: str) -> Any:
        rank = here()
        if rank is not None and not OWN_GENERATORS and name in _REFUSED:
            raise UnavailableError(f"torch.Generator.{name}() {_WHY_REFUSED}")
        return getattr(_default if rank is None else rank.torch, name)


_stand_in: Any = _DefaultGenerator()
# Compare addresses, because operators get different Python objects for the same generator.
_DEFAULTS = {_default._cdata, torch.Generator.__getattribute__(_stand_in, "_cdata")}


def _of_torch() -> list[Replacement]:
    return [(owner, "default_generator", _stand_in) for owner in (torch.random, torch, torch._C)]


@functools.cache
def generator_operators() -> list[Any]:
    """Return the aten operators that take a generator and have a CPU kernel."""
    found = []
    for name in _c._dispatch_get_all_op_names():
        base, _, overload = name.removeprefix("aten::").partition(".")
        if name.startswith("aten::") and _c._dispatch_has_kernel_for_dispatch_key(name, "CPU"):
            operator = getattr(getattr(torch.ops.aten, base), overload or "default")
            if any(argument.name == "generator" for argument in operator._schema.arguments):
                found.append(operator)
    return found


@functools.cache
def _given_a_generator(operator: Any) -> Callable[..., Any]:
    """Return a replacement for an operator that passes the calling rank's generator if the caller passes none."""
    cpu = _c.DispatchKey.CPU
    backends = _c._dispatch_keyset_full_after(_c.DispatchKey.BackendSelect)
    # `redispatch_boxed` releases the GIL while the kernel runs; a kernel from `torch.library.get_kernel` would not.
    call = operator._handle.redispatch_boxed
    # Some operators take the generator only as a keyword argument, which follows all other arguments.
    place = [argument.name for argument in operator._schema.arguments].index("generator")

    def draw(keys: Any, *args: Any, **kwargs: Any) -> Any:
        given = args[place] if len(args) > place else kwargs.get("generator")
        # The CPU key is also set for sparse CPU tensors, whose values are generated by CPU kernels.
        if keys.has(cpu) and (given is None or given._cdata in _DEFAULTS):
            rank = _thread.rank
            if rank is not None or given is not None:
                args = args[:place]
                kwargs["generator"] = _default if rank is None else rank.torch
        return call(keys & backends, *args, **kwargs)

    return draw


# -- Python and numpy ------------------------------------------------------------------------------
_random: Any = random._inst


def _python_generator(own: random.Random) -> random.Random:
    rank = here()
    return own if rank is None else rank.python


def _forwarded(name: str) -> Callable[..., Any]:
    real: Callable[..., Any] = getattr(random.Random, name)
    return functools.wraps(real)(lambda own, *args, **kwargs: real(_python_generator(own), *args, **kwargs))


_STATE = ("random", "getrandbits", "seed", "getstate", "setstate")
"""Methods of Python's generator that use its state (besides one attribute); all others call these."""
_RankRandom: Any = type(
    "Random",
    (random.Random,),
    {
        **{name: _forwarded(name) for name in _STATE},
        "gauss_next": property(
            lambda own: vars(_python_generator(own))["gauss_next"],
            lambda own, value: vars(_python_generator(own)).update(gauss_next=value),
        ),
    },
)


def _of_python() -> list[Replacement]:
    """Replace the class of `random`'s global generator, and the module's functions that access its state directly."""
    names = [(random, name, MethodType(getattr(_RankRandom, name), _random)) for name in _STATE]
    return [(_random, "__class__", _RankRandom), *names]


def _numpy_random() -> Any:
    try:
        return importlib.import_module("numpy.random")
    except ImportError:
        return None


@functools.cache
def _of_numpy() -> list[Replacement]:
    numpy = _numpy_random()
    if numpy is None:
        return []
    real = numpy.mtrand._rand

    def generator() -> Any:
        rank = here()
        return real if rank is None else rank.numpy

    def bound(name: str) -> Callable[..., Any]:
        @functools.wraps(getattr(real, name))
        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(generator(), name)(*args, **kwargs)

        return call

    # Use a subclass of `RandomState`, because some code checks the class. Scikit-learn, for example, uses numpy's
    # global `RandomState` if it gets no generator.
    kind = type("RandomState", (type(real),), {"__getattribute__": lambda _, name: getattr(generator(), name)})
    names = [name for name, value in vars(numpy).items() if getattr(value, "__self__", None) is real]
    return [(numpy.mtrand, "_rand", kind()), *((numpy, name, bound(name)) for name in names)]


# -- threads ---------------------------------------------------------------------------------------
def _run_as(rank: ThreadRank | None, run: Callable[[], object]) -> None:
    _belong(rank)
    run()


def _of_threads() -> list[Replacement]:
    real_start = threading.Thread.start
    real_run = DaemonThreadPool.run

    def start(thread: threading.Thread) -> None:
        rank = here()
        if rank is not None:
            thread.__dict__["run"] = functools.partial(_run_as, rank, thread.run)
        real_start(thread)

    def run(pool: DaemonThreadPool, task: Callable[[], None]) -> None:
        # Ranks share this pool's threads, so each task sets its thread's rank.
        real_run(pool, functools.partial(_run_as, here(), task))

    return [(threading.Thread, "start", start), (DaemonThreadPool, "run", run)]
