"""Calls inside a function that `torch.compile` compiles give what they give without it.

A program of two ranks for each room runs here, and in the soak every example of a docstring that starts ranks.
"""

from __future__ import annotations

import doctest
import importlib
import logging
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from import_graph import modules
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback

import unisono as un
from unisono.core import compiled_code
from unisono.gradients import SyncBatchNorm
from unisono.testing import pool

Rank = Callable[[un.Communicator], Any]

pytestmark = [
    # Torch warns of names of its own, and of gradients that it looks for itself.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning"),
    pytest.mark.skipif(
        sys.version_info >= (3, 14) and torch.__version__ < (2, 10), reason="torch 2.9 compiles nothing on Python 3.14"
    ),
]


def network(comm: un.Communicator, *, batch_norm: bool = False) -> nn.Sequential:
    middle = SyncBatchNorm(3, comm) if batch_norm else nn.Tanh()
    model = nn.Sequential(nn.Linear(2, 3), middle, nn.Linear(3, 1))
    numbers = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=numbers)
    return model


def calls(comm: un.Communicator) -> Any:
    total = torch.full((3,), comm.rank + 1.0) * 2
    comm.all_reduce(total)
    work = comm.all_reduce(total, async_op=True)
    work.wait()
    parts = [torch.empty(3) for _ in range(comm.size)]
    comm.all_gather(parts, total + comm.rank)
    comm.barrier()
    return (torch.cat(parts) + 1).tolist(), comm.all_gather_object({"rank": comm.rank})


def training(comm: un.Communicator, how: str, kind: type[torch.optim.Optimizer], compiler: str = "") -> list[float]:
    """Train for three steps, each of which is one compiled function; return the sums of the parameters."""
    model = network(comm, batch_norm=how == "SyncBatchNorm")
    optimizer: Any
    if how.startswith("ZeRO"):
        optimizer = un.sharding.ShardedOptimizer(kind, model, comm, shard_gradients=how == "ZeRO-2", lr=0.1)
    else:
        optimizer = kind(model.parameters(), lr=0.1)
    averager = un.GradientAverager(model, comm) if how in ("averager", "SyncBatchNorm") else None
    guard = un.gradients.NanGuard(model, comm)

    def step(x: torch.Tensor) -> None:
        # Torch's own optimizers are no longer for CPUs then where Dynamo compiles the write and not the step.
        for group in optimizer.param_groups if how.startswith("ZeRO") else ():
            group["lr"] *= 0.9
        optimizer.zero_grad()
        if averager is not None:
            with averager.no_sync():
                model(x).square().mean().backward()
        model(x + 1).square().mean().backward()
        guard.check()
        if how in ("average_gradients", "ZeRO-1"):
            un.average_gradients(model, comm)
        optimizer.step()

    run = torch.compile(step, backend=compiler) if compiler else step
    for number in range(3):
        run(torch.tensor([[0.5, -1.0], [2.0, 1.0]]) * (comm.rank + number))
    if averager is not None:
        averager.remove()
    return [p.sum().item() for p in model.parameters()]


KINDS = ["averager", "average_gradients", "SyncBatchNorm", "ZeRO-1", "ZeRO-2"]


def test_calls_end_a_graph() -> None:
    wanted = ([13.0] * 3 + [14.0] * 3, [{"rank": 0}, {"rank": 1}])
    assert un.launch(torch.compile(calls, backend="eager"), 2, "thread") == [wanted] * 2


def beside(comm: un.Communicator, how: str, kind: type[torch.optim.Optimizer], compiler: str) -> bool:
    found, wanted = training(comm, how, kind, compiler), training(comm, how, kind)
    return bool(torch.allclose(torch.tensor(found), torch.tensor(wanted), atol=1e-6))


@pytest.mark.parametrize("how", ["averager", pytest.param("ZeRO-2", marks=pytest.mark.soak)])
def test_whole_steps_train_as_without_a_compiler(how: str) -> None:
    assert un.launch(beside, 2, "thread", args=(how, torch.optim.SGD, "eager")) == [True, True]


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("backend", ["shm", "tcp", "gloo"])
@pytest.mark.parametrize("how", KINDS)
def test_whole_steps_of_processes_train_as_without_a_compiler(how: str, backend: str, size: int) -> None:
    # The gradient of a bias before a SyncBatchNorm is rounding alone, which Adam would make steps of.
    kind = torch.optim.SGD if how == "SyncBatchNorm" else torch.optim.Adam
    assert all(pool(backend, 3, timeout=200.0).run(beside, how, kind, "aot_eager", size=size))


def test_what_a_call_runs_is_not_compiled() -> None:
    """The parameters of this optimizer are parts, which a guard of Dynamo's takes for those of the last step."""
    seen = list[bool]()

    class Probe(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append(get_eval_frame_callback() is None)
            return super().step(closure)

    with un.init() as comm:
        optimizer = un.sharding.ShardedOptimizer(Probe, nn.Linear(2, 1), comm, elementwise=True, lr=0.1)
        torch.compile(optimizer.step, backend="eager")()
    assert seen == [True]


def test_model_is_compiled_while_its_gradients_are_sharded() -> None:
    def program(comm: un.Communicator) -> list[list[float]]:
        model = nn.Linear(2, 1, bias=False)
        optimizer = un.sharding.ShardedOptimizer(
            torch.optim.SGD, model, comm, shard_gradients=True, lr=0.0, elementwise=True
        )
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(RuntimeError, match=r"p\.grad, which is sharded"):
            model.weight.grad.norm()
        found: list[list[float]] = torch.compile(model, backend="eager", fullgraph=True)(torch.zeros(1, 2)).tolist()
        optimizer.remove()
        return found

    assert un.launch(program, 2, "thread") == [[[0.0]], [[0.0]]]


# -- the rule ----------------------------------------------------------------------------------------------
def test_rank_and_size_stay_in_the_graph() -> None:
    def program(comm: un.Communicator) -> list[float]:
        @torch.compile(backend="eager", fullgraph=True)
        def scaled(x: torch.Tensor) -> torch.Tensor:
            return (x.to(comm.device) * comm.rank + comm.size) * (2 if comm.backend == "thread" else 1)

        found: list[float] = scaled(torch.ones(2)).tolist()
        return found

    assert un.launch(program, 2, "thread") == [[4.0, 4.0], [6.0, 6.0]]


def test_model_of_an_averager_stays_one_graph() -> None:
    def program(comm: un.Communicator) -> bool:
        model = nn.Linear(2, 1)
        averager = un.GradientAverager(model, comm)
        torch.compile(model, backend="eager", fullgraph=True)(torch.full((1, 2), comm.rank + 1.0)).sum().backward()
        averager.remove()
        assert model.weight.grad is not None
        return model.weight.grad.tolist() == [[1.5, 1.5]]

    assert un.launch(program, 2, "thread") == [True, True]


def test_files_stay_in_the_graph_when_torch_makes_a_group() -> None:
    from torch._dynamo import trace_rules

    trace_rules.clear_lru_cache()
    assert any(file.endswith("unisono/comm/place.py") for file in trace_rules.get_mod_inlinelist())


def test_torch_without_the_private_names_is_left_alone() -> None:
    dynamo = ModuleType("convert_frame")
    before = dict(vars(dynamo))
    compiled_code._add_rules(dynamo)
    assert vars(dynamo) == before


@pytest.mark.soak
@pytest.mark.parametrize("first", ["import torch._dynamo", ""])
def test_dynamo_may_be_imported_before_and_after(first: str) -> None:
    program = f"""
        import sys
        {first}
        import unisono as un
        assert bool({first!r}) == ("torch._dynamo" in sys.modules)
        from torch._dynamo.trace_rules import check_file
        print(check_file(un.Communicator.split.__code__.co_filename).skipped)
        print(check_file(un.autograd.all_reduce.__code__.co_filename, True).skipped)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


# -- every public name -------------------------------------------------------------------------------------
class Compiled:
    """A rank's program, which is compiled where it runs."""

    def __init__(self, program: Rank) -> None:
        self.program = program

    def __call__(self, *given: Any) -> Any:
        return torch.compile(self.program, backend="eager")(*given)


def wrong_examples(names: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run the examples of modules, whose programs are compiled; return the names of those that show something else."""
    for name in ("launch", "simulate"):
        plain = getattr(un, name)
        monkeypatch.setattr(
            un, name, lambda program, *given, _run=plain, **more: _run(Compiled(program), *given, **more)
        )
    wrong = []
    for name in names:
        finder = doctest.DocTestFinder(recurse=True)
        for test in finder.find(importlib.import_module(name), extraglobs={"torch": torch, "un": un}):
            if "un.launch(" in (test.docstring or "") or "un.simulate(" in (test.docstring or ""):
                text: list[str] = []
                # Dynamo removes what it has put into the globals when it forgets the code.
                done = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=text.append, clear_globs=False)
                wrong += [f"{test.name}: {''.join(text)}"] if done.failed else []
    return wrong


# A ShardedModel refuses to be compiled.
MODULES = [name for name in modules() if not name.endswith("__main__") and name != "unisono.sharding.model"]


@pytest.mark.soak
@pytest.mark.parametrize("room", sorted({".".join(name.split(".")[:2]) for name in MODULES if "." in name}))
def test_examples_of_docstrings(room: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    names = [name for name in MODULES if name == room or name.startswith(f"{room}.")]
    found = wrong_examples(names, monkeypatch)
    torch.compiler.reset()
    assert not found, "\n".join(found)


class HandlerThatMeetsACompiler(logging.Handler):
    """Holds its lock in one thread until another thread, which is compiling, also logs."""

    def __init__(self) -> None:
        super().__init__()
        self.held = threading.Event()
        self.compiling = threading.Event()
        self.texts: list[str] = []

    def acquire(self) -> None:
        super().acquire()
        if threading.current_thread().name == "logs":
            self.held.set()
            self.compiling.wait(20)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def test_threads_that_compile_and_log_do_not_wait_for_each_other() -> None:
    handler = HandlerThatMeetsACompiler()
    logger = logging.getLogger("threads that compile")
    logger.propagate = False
    logger.addHandler(handler)

    def backend(graph: Any, _inputs: Any) -> Any:
        handler.compiling.set()
        logger.warning("compiling")
        return graph

    def log() -> None:
        torch._dynamo.graph_break()
        logger.warning("logging")

    def compile_after() -> None:
        handler.held.wait(20)
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))

    # Threads are daemons, because a deadlock would otherwise keep the test process from exiting.
    one = threading.Thread(target=torch.compile(log, backend="eager"), name="logs", daemon=True)
    other = threading.Thread(target=compile_after, daemon=True)
    one.start()
    other.start()
    one.join(30)
    other.join(30)
    assert sorted(handler.texts) == ["compiling", "logging"]


def compiles(comm: un.Communicator) -> list[float]:
    """Compile with a backend that reads the clock more often than a simulated rank does without letting others run."""

    def backend(graph: Any, _inputs: Any) -> Any:
        for _ in range(1000):
            time.monotonic()
        return graph

    found: list[float] = torch.compile(lambda t: t + comm.rank, backend=backend)(torch.ones(2)).tolist()
    return found


def test_simulated_ranks_may_compile_at_the_same_time() -> None:
    # Its lock is simulated if a simulated rank imports it first.
    importlib.import_module("torch._dynamo")
    assert un.simulate(compiles, 2).results == [[1.0, 1.0], [2.0, 2.0]]
