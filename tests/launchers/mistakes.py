"""Mistakes that users make, each a few lines of a program, and the programs that contain them.

The comment `# here` marks the line that the error must show. A function that takes `comm` runs on two ranks; another
one makes its own communicator.
"""

from __future__ import annotations

import inspect
import os
import re
import signal
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import unisono as un

__all__ = ["MISTAKES", "Mistake"]

TIMEOUT_S = 8
PREAMBLE = """\
import os, pytest, signal, socket, sys, threading, time
import torch
import unisono as un


"""


@dataclass(frozen=True)
class Mistake:
    """A mistake, and parts of its error's sentence, one of which must be there once."""

    function: Callable[..., Any]
    sentences: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def takes_comm(self) -> bool:
        return bool(inspect.signature(self.function).parameters)

    @property
    def line(self) -> int:
        """Number of the line of the user's file that the error must show."""
        (found,) = (number for number, line in enumerate(self._program("x").splitlines(), 1) if "# here" in line)
        return found

    def script(self, start: bool = True) -> str:
        """Return a script for ranks that a launcher starts; without `start`, it only defines the program."""
        if not start:
            return _shown(self._program("train"))
        begin = f"with un.init(timeout={TIMEOUT_S}) as comm:\n    train(comm)" if self.takes_comm else "train()"
        return _shown(f"{self._program('train')}\n\n{begin}\n")

    def test(self, backend: str) -> str:
        """Return a file of tests."""
        program = self._program(f"test_{self.name}")
        if self.takes_comm:
            marker = f'@pytest.mark.ranks(2, "{backend}", timeout={TIMEOUT_S})'
            program = program.replace("\n\ndef ", f"\n{marker}\ndef ")
        return _shown(program)

    def cell(self) -> str:
        """Return a cell of a notebook."""
        start = f'un.launch(train, 2, "shm", timeout={TIMEOUT_S})' if self.takes_comm else "train()"
        return _shown(f"{self._program('train')}\n\n{start}\n")

    def _program(self, name: str) -> str:
        source = textwrap.dedent(inspect.getsource(self.function))
        body = source[source.index("def ") :].replace(f"def {self.name}(", f"def {name}(", 1)
        return PREAMBLE + body.replace(": un.Communicator", "").replace(" -> None", "")


def _shown(program: str) -> str:
    return re.sub(r"  # (type|here).*", "", program)


MISTAKES: list[Mistake] = []


def mistake(*sentences: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a function to the mistakes."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        MISTAKES.append(Mistake(function, sentences))
        return function

    return add


@mistake("rank 1 has left", "for rank 1, which has not arrived. Is it alive, or did it skip a call?")
def rank_0_only(comm: un.Communicator) -> None:
    if comm.rank == 0:
        comm.all_reduce(torch.ones(2))  # here


@mistake("rank 1 has left", "for rank 1, which has not arrived. Is it alive, or did it skip a call?")
def unequal_batch_counts(comm: un.Communicator) -> None:
    model = torch.nn.Linear(2, 1)
    _averager = un.GradientAverager(model, comm)
    for _ in range(3 if comm.rank else 5):
        model(torch.ones(4, 2)).sum().backward()  # here


@mistake("ranks differ in counts")
def wrong_size(comm: un.Communicator) -> None:
    comm.all_reduce(torch.ones(3 + comm.rank))  # here


@mistake("ranks differ in dtype:")
def wrong_dtype(comm: un.Communicator) -> None:
    dtype = torch.float64 if comm.rank else torch.float32
    comm.all_reduce(torch.ones(3, dtype=dtype))  # here


@mistake("ranks differ in op:")
def wrong_op(comm: un.Communicator) -> None:
    comm.all_reduce(torch.ones(3), op="max" if comm.rank else "sum")  # here


@mistake("unknown reduce operation")
def unknown_op(comm: un.Communicator) -> None:
    comm.all_reduce(torch.ones(3), op="mean")  # here


@mistake("call set_epoch(epoch) before each epoch")
def forgotten_set_epoch(comm: un.Communicator) -> None:
    sampler = un.data.PartitionSampler(list(range(8)), comm)
    for _ in range(2):
        list(sampler)  # here


@mistake("is taken by another program")
def port_taken() -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    un.init(init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=2, timeout=2)  # here


@mistake("needs mpi4py")
def missing_package() -> None:
    sys.modules["mpi4py"] = None  # type: ignore[assignment]  # as an import that fails
    un.init(backend="mpi")  # here


@mistake("nccl needs a build of torch with CUDA")
def gpu_missing() -> None:
    un.init(backend="nccl", timeout=2)  # here


@mistake("AssertionError: Torch not compiled with CUDA enabled")
def tensor_on_missing_gpu(comm: un.Communicator) -> None:
    comm.all_reduce(torch.ones(3).to("cuda"))  # here


@mistake("args[0] cannot be sent to the ranks")
def unpicklable_argument() -> None:
    un.launch(print, 2, "shm", args=(threading.Lock(),))  # here


@mistake("pass trusted=True")
def object_not_sendable(comm: un.Communicator) -> None:
    comm.broadcast_object(torch.nn.Linear(2, 1), 0)  # here


@mistake("SIGKILL")
def killed_rank(comm: un.Communicator) -> None:
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()  # here


@mistake("KeyError: 'no such sample'")
def exception_on_one_rank(comm: un.Communicator) -> None:
    if comm.rank == 1:
        raise KeyError("no such sample")  # here
    comm.barrier()


@mistake("ranks differ in operation")
def different_calls(comm: un.Communicator) -> None:
    if comm.rank:
        comm.barrier()
    else:
        comm.all_reduce(torch.ones(3))  # here


@mistake("elements that share memory")
def expanded_tensor(comm: un.Communicator) -> None:
    comm.all_reduce(torch.ones(1).expand(3))  # here


@mistake("numbers, not dict")
def no_tensor(comm: un.Communicator) -> None:
    comm.all_reduce({"loss": 1.0})  # type: ignore[arg-type]  # here


@mistake("src=2 is not a rank")
def wrong_root(comm: un.Communicator) -> None:
    comm.broadcast(torch.ones(2), src=comm.size)  # here


@mistake("in 'parameters of the model', at ['bias']: rank")
def different_models(comm: un.Communicator) -> None:
    model = torch.nn.Linear(2, 3 if comm.rank else 4)
    un.broadcast_parameters(model, comm)  # here


@mistake("Pass find_unused_parameters=True")
def unused_parameters(comm: un.Communicator) -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)])
    _averager = un.GradientAverager(model, comm)
    model[comm.rank](torch.ones(1, 2)).sum().backward()  # here


@mistake("a deadlock")
def both_receive(comm: un.Communicator) -> None:
    t = torch.ones(2)
    comm.recv(t, src=1 - comm.rank)  # here
    comm.send(t, dst=1 - comm.rank)


@mistake("the communicator is closed")
def closed_communicator(comm: un.Communicator) -> None:
    other = comm.dup()
    other.close()
    other.barrier()  # here


@mistake("does not require grad")
def all_parameters_frozen(comm: un.Communicator) -> None:
    model = torch.nn.Linear(2, 1).requires_grad_(False)
    _averager = un.GradientAverager(model, comm)
    model(torch.ones(1, 2)).sum().backward()  # here


@mistake("must have one tensor for each of the 2 ranks")
def wrong_list_length(comm: un.Communicator) -> None:
    comm.all_gather([torch.zeros(1)], torch.ones(1))  # here


@mistake("for rank 1")
def late_rank(comm: un.Communicator) -> None:
    time.sleep(60 if comm.rank == 1 else 0)
    comm.barrier()  # here


@mistake("is WORLD_SIZE right?")
def wrong_world_size() -> None:
    port = str(socket.create_server(("127.0.0.1", 0)).getsockname()[1])
    here = {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({**here, **os.environ, "WORLD_SIZE": "3"})
    un.init(timeout=2)  # here
