"""Ranks that are threads: which one a thread belongs to, and the random generators that are its own.

A process has one default generator each of torch, Python and numpy. While ranks live that are threads, these answer by
the thread that asks. All three are Python objects, which are replaced by ones that forward to the calling rank's. That
is enough for what calls methods (`torch.manual_seed`, `fork_rng`, activation checkpointing), but torch's operators take
theirs in C++. So those of aten that accept a generator are intercepted where torch selects a backend. On the CPU, given
none or the default one, they are passed the calling rank's. All of this ends with the last of the ranks.
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

# Not in torch's annotations.
_c: Any = torch._C
OWN_GENERATORS = all(
    hasattr(_c, f"_dispatch_{name}")
    for name in ("get_all_op_names", "has_kernel_for_dispatch_key", "keyset_full_after")
)
"""Whether torch can be given a generator for each rank, which needs private functions of it."""

_REFUSED = ("manual_seed", "seed", "set_state")
_WHY_REFUSED = (
    "sets one generator for all ranks, which are threads of one process here, and this torch cannot give each its own. "
    "Make a generator and pass it on, or use processes as ranks"
)
_default: Any = torch.random.default_generator


class ThreadRank:
    """What a rank that is a thread has to itself. As a context, this thread and those that it starts belong to it.

    Args:
        seed: Seed of its generators; None for one of the system, as a new process has.

    Attributes:
        torch, python, numpy: Its random generators; numpy's is None without numpy.
        world: What a test keeps for it of torch.distributed.
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
    """Return the rank that this thread belongs to; None outside of ranks that are threads."""
    return _thread.rank


def _belong(rank: ThreadRank | None) -> None:
    _thread.rank = rank
    # A thread of autograd's, which runs hooks and what is computed again, would belong to no rank.
    torch.autograd.set_multithreading_enabled(rank is None)


@contextmanager
def _overridden() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    try:
        operators = generator_operators() if OWN_GENERATORS else []
        for operator in operators:
            library.impl(operator, _given_a_generator(operator), "BackendSelect", with_keyset=True)
        # The end of a registration frees the function, which a thread outside of all ranks may be about to run: it only
        # waits for Python's lock. So functions are kept until the next ones are registered.
        keep = getattr(torch.library, "get_kernel", None)
        _kept[:] = [keep(operator, "BackendSelect") for operator in operators if keep is not None]
        with replaced([*_of_torch(), *_of_python(), *_of_numpy(), *_of_threads()]):
            yield
    finally:
        library._destroy()


_kept: list[Any] = []
own_generators: SharedContext = SharedContext(_overridden)
"""Context of ranks that have generators of their own. What starts ranks enters it, too, so that it is made once."""


def _after_fork() -> None:
    """In a process that a rank has forked, do what Python does for the generator that it knows of."""
    own_generators.renew_lock()
    rank = here()
    if rank is not None:
        rank.python.seed()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# -- torch -----------------------------------------------------------------------------------------
class _DefaultGenerator(torch.Generator):
    """Stands in for torch's default generator; as an argument of an operator, too."""

    def __getattribute__(self, name: str) -> Any:
        rank = here()
        if rank is not None and not OWN_GENERATORS and name in _REFUSED:
            raise UnavailableError(f"torch.Generator.{name}() {_WHY_REFUSED}")
        return getattr(_default if rank is None else rank.torch, name)


_stand_in: Any = _DefaultGenerator()
# An operator is given other Python objects of the same generators.
_DEFAULTS = {_default._cdata, torch.Generator.__getattribute__(_stand_in, "_cdata")}


def _of_torch() -> list[Replacement]:
    return [(owner, "default_generator", _stand_in) for owner in (torch.random, torch, torch._C)]


@functools.cache
def generator_operators() -> list[Any]:
    """Return the operators of aten that take a generator and have a kernel on the CPU."""
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
    """Return an implementation of an operator that passes the calling rank's generator on, where none is given."""
    cpu = _c.DispatchKey.CPU
    backends = _c._dispatch_keyset_full_after(_c.DispatchKey.BackendSelect)
    # Gives Python's lock back while the kernel runs, as a kernel called by `torch.library.get_kernel` does not.
    call = operator._handle.redispatch_boxed
    # Some take it by keyword only: then it is behind all others.
    place = [argument.name for argument in operator._schema.arguments].index("generator")

    def draw(keys: Any, *args: Any, **kwargs: Any) -> Any:
        given = args[place] if len(args) > place else kwargs.get("generator")
        # True also of sparse tensors on the CPU, whose kernels draw for their values.
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
"""Methods of Python's generator that touch its state, besides one attribute; all others call these."""
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
    """The class, since `from random import shuffle` is bound to the object; names bound to C code are replaced."""
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

    # Of the same class, for what checks it: scikit-learn takes this object where it is given no generator.
    kind = type("RandomState", (type(real),), {"__getattribute__": lambda _, name: getattr(generator(), name)})
    names = [name for name, value in vars(numpy).items() if getattr(value, "__self__", None) is real]
    return [(numpy.mtrand, "_rand", kind()), *((numpy, name, bound(name)) for name in names)]


# -- threads ---------------------------------------------------------------------------------------
def _belonging(rank: ThreadRank | None, run: Callable[[], object]) -> Callable[[], None]:
    def run_as_rank() -> None:
        _belong(rank)
        run()

    return run_as_rank


def _of_threads() -> list[Replacement]:
    real_start = threading.Thread.start
    real_run = DaemonThreadPool.run

    def start(thread: threading.Thread) -> None:
        rank = here()
        if rank is not None:
            thread.__dict__["run"] = _belonging(rank, thread.run)
        real_start(thread)

    def run(pool: DaemonThreadPool, task: Callable[[], None]) -> None:
        # Ranks share its threads.
        real_run(pool, _belonging(here(), task))

    return [(threading.Thread, "start", start), (DaemonThreadPool, "run", run)]
