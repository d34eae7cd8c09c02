"""Programs on torch's own gloo, right and wrong ones, on forked ranks that are watched, and what becomes of each rank.

    python tests/interop/watched_programs.py [--ranks 2] [--no-watch] program ... before:program ...

A process that does nothing but fork them saves each rank the imports. It prints JSON: for each program, for each rank
the exit status (negated: a signal; None: it hung), the seconds until then, what it wrote to standard error, and a hash
of what the program returned. Programs are those here, and those of `torch_features`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from unisono.interop import watch

LIMIT_S = 4.0
HANGS_AFTER_S = 30.0

Program = Callable[[int, int], object]
WRONG: dict[str, Program] = {}
RIGHT: dict[str, Program] = {}


def wrong(program: Program) -> Program:
    WRONG[program.__name__] = program
    return program


def right(program: Program) -> Program:
    RIGHT[program.__name__] = program
    return program


def ones(count: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(count, dtype=dtype)


# -- operations, orders, arguments -----------------------------------------------------------------
@wrong
def operation(rank: int, size: int) -> None:
    dist.all_reduce(ones()) if rank == 0 else dist.broadcast(ones(), 0)
    dist.barrier()


@wrong
def order(rank: int, size: int) -> None:
    for call in (dist.all_reduce, dist.barrier)[:: -1 if rank else 1]:
        call() if call is dist.barrier else call(ones())
    dist.barrier()


@wrong
def asynchronous_order(rank: int, size: int) -> None:
    counts = (3, 5)[:: -1 if rank else 1]
    works = [dist.all_reduce(ones(count), async_op=True) for count in counts]
    for work in works:
        work.wait()
    dist.barrier()


@wrong
def dtype_of_the_same_width(rank: int, size: int) -> None:
    dist.all_reduce(ones(dtype=torch.int32 if rank else torch.float32))
    dist.barrier()


@wrong
def dtype_of_another_width(rank: int, size: int) -> None:
    dist.all_reduce(ones(dtype=torch.float64 if rank else torch.float32))
    dist.barrier()


@wrong
def shape(rank: int, size: int) -> None:
    dist.all_reduce(ones(4 + (rank > 0)))
    dist.barrier()


@wrong
def shape_of_gathered_tensors(rank: int, size: int) -> None:
    count = 4 + (rank > 0)
    dist.all_gather([ones(count) for _ in range(size)], ones(count))
    dist.barrier()


@wrong
def reduce_operation(rank: int, size: int) -> None:
    dist.all_reduce(ones(), op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)
    dist.barrier()


@wrong
def root_of_broadcast(rank: int, size: int) -> None:
    dist.broadcast(ones(), min(rank, 1))
    dist.barrier()


@wrong
def root_of_reduce(rank: int, size: int) -> None:
    dist.reduce(ones(), min(rank, 1))
    dist.barrier()


@wrong
def splits(rank: int, size: int) -> None:
    counts = [2] * size
    if rank == 0:
        counts[1] = 3
    dist.all_to_all_single(ones(2 * size), ones(sum(counts)), [2] * size, counts)
    dist.barrier()


@wrong
def objects_on_one_rank(rank: int, size: int) -> None:
    if rank == 0:
        dist.broadcast_object_list(["settings"], 0)
    dist.barrier()


# -- groups ----------------------------------------------------------------------------------------
@wrong
def group(rank: int, size: int) -> None:
    part = dist.new_group(range(size))
    dist.all_reduce(ones(), group=part if rank else None)


@wrong
def order_of_groups(rank: int, size: int) -> None:
    groups = [None, dist.new_group(range(size))]
    for each in groups[:: -1 if rank else 1]:
        dist.all_reduce(ones(), group=each)


@wrong
def dtype_in_a_part(rank: int, size: int) -> None:
    part = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(ones(dtype=torch.int32 if rank else torch.float32), group=part)
    dist.barrier()


# -- ranks that do not come ------------------------------------------------------------------------
@wrong
def returns_early(rank: int, size: int) -> None:
    for _ in range(3 - (rank == 1)):
        dist.all_reduce(ones())


@wrong
def returns_early_without_a_message(rank: int, size: int) -> None:
    if rank != 1:
        dist.recv(ones(), 1)


@wrong
def message_after_a_collective(rank: int, size: int) -> None:
    if rank == 0:
        dist.recv(ones(), 1)
    dist.all_reduce(ones())
    if rank == 1:
        dist.send(ones(), 0)


@wrong
def receives_from_each_other(rank: int, size: int) -> None:
    dist.recv(ones(), (rank + 1) % size)
    dist.send(ones(), (rank - 1) % size)


@wrong
def sends_to_each_other(rank: int, size: int) -> None:
    # Gloo sends small messages before they are received.
    dist.send(ones(1 << 24), (rank + 1) % size)
    dist.recv(ones(1 << 24), (rank - 1) % size)


@wrong
def waits_before_it_sends(rank: int, size: int) -> None:
    dist.irecv(ones(), (rank - 1) % size).wait()
    dist.isend(ones(), (rank + 1) % size).wait()


@wrong
def tags_in_another_order(rank: int, size: int) -> None:
    for tag in (1, 2) if rank % 2 else (2, 1):
        dist.recv(ones(), rank ^ 1, tag=tag)
        dist.send(ones(), rank ^ 1, tag=tag)


@wrong
def receive_too_many(rank: int, size: int) -> None:
    if rank == 1:
        for other in range(size):
            dist.send(ones(), other) if other != 1 else None
    for _ in range(2 * (rank != 1)):
        dist.recv(ones(), 1)
    # Stay alive without a call: a rank that ended would be named for that.
    while rank == 1:
        time.sleep(0.01)


@wrong
def receives_from_any_that_never_send(rank: int, size: int) -> None:
    dist.recv(ones())


@wrong
def branch_of_one_rank(rank: int, size: int) -> None:
    if rank != 1:
        dist.all_reduce(ones())


@wrong
def reduce_of_a_logger(rank: int, size: int) -> None:
    dist.all_reduce(ones())
    if rank == 0:
        dist.reduce(ones(1), 0)
    dist.all_reduce(ones())


@wrong
def barrier_too_many(rank: int, size: int) -> None:
    if rank == 1:
        dist.barrier()
    dist.all_reduce(ones())


@wrong
def raises(rank: int, size: int) -> None:
    if rank == 1:
        raise KeyError("no such sample")
    dist.all_reduce(ones())


@wrong
def raises_and_cleans_up(rank: int, size: int) -> None:
    try:
        dist.all_reduce(ones())
        if rank == 1:
            raise KeyError("no such sample")
        dist.all_reduce(ones())
    finally:
        dist.destroy_process_group()


@wrong
def exits_with_a_status(rank: int, size: int) -> None:
    if rank == 1:
        sys.exit(3)
    dist.all_reduce(ones())


@wrong
def ends_without_a_word(rank: int, size: int) -> None:
    if rank == 1:
        os._exit(0)
    dist.all_reduce(ones())


@wrong
def is_killed(rank: int, size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(ones())


@wrong
def is_killed_while_others_compute(rank: int, size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(HANGS_AFTER_S)


@wrong
def is_stopped(rank: int, size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(ones())


@wrong
def loops(rank: int, size: int) -> None:
    while rank == 1:
        time.sleep(0.01)
    dist.all_reduce(ones())


# -- training --------------------------------------------------------------------------------------
def train(rank: int, steps: int, model: torch.nn.Module, before: Callable[[int], object] = lambda step: None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        before(step)
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def ddp() -> torch.nn.Module:
    torch.manual_seed(0)
    return DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)))


def fsdp(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


@wrong
def ddp_with_uneven_batches(rank: int, size: int) -> None:
    train(rank, 3 - (rank == 1), ddp())


@wrong
def ddp_with_a_metric_on_one_rank(rank: int, size: int) -> None:
    train(rank, 3, ddp(), lambda step: step == 1 and rank == 0 and dist.all_reduce(ones(1)))


@wrong
def ddp_that_raises(rank: int, size: int) -> None:
    def fail(step: int) -> None:
        if step == 1 and rank == 1:
            raise ValueError("a bad batch")

    train(rank, 3, ddp(), fail)


@wrong
def ddp_of_different_models(rank: int, size: int) -> None:
    DistributedDataParallel(torch.nn.Linear(4, 4 + (rank == 1)))
    dist.barrier()


@wrong
def ddp_that_is_killed(rank: int, size: int) -> None:
    train(rank, 3, ddp(), lambda step: step == 1 and rank == 1 and os.kill(os.getpid(), signal.SIGKILL))


@wrong
def fsdp_with_uneven_batches(rank: int, size: int) -> None:
    train(rank, 3 - (rank == 1), fsdp())


@wrong
def fsdp_with_a_metric_on_one_rank(rank: int, size: int) -> None:
    train(rank, 3, fsdp(), lambda step: step == 1 and rank == 0 and dist.all_reduce(ones(1)))


# -- right programs --------------------------------------------------------------------------------
@right
def all_operations(rank: int, size: int) -> None:
    rows = [ones(3) for _ in range(size)]
    dist.all_reduce(ones(), op=dist.ReduceOp.MAX)
    dist.broadcast(ones(), src=1)
    dist.reduce(ones(), 0)
    dist.all_gather(rows, ones(3))
    dist.all_gather_into_tensor(ones(3 * size), ones(3))
    dist.gather(ones(3), rows if rank == 0 else None, dst=0)
    dist.scatter(ones(3), rows if rank == 0 else None, src=0)
    dist.reduce_scatter(ones(3), rows)
    dist.reduce_scatter_tensor(ones(3), ones(3 * size))
    dist.all_to_all_single(ones(size), ones(size))
    counts = [1 + rank + other for other in range(size)]
    dist.all_to_all_single(ones(sum(counts)), ones(sum(counts)), counts, counts)
    dist.all_gather_object([None] * size, {"rank": rank})
    dist.broadcast_object_list([rank], 0)
    dist.monitored_barrier()
    dist.barrier()
    with torch.inference_mode():
        dist.all_reduce(ones())
    dist.all_reduce(ones(6).view(2, 3) if rank else ones(6).view(3, 2))
    dist.send(ones(), 1) if rank == 0 else dist.recv(ones(), 0) if rank == 1 else None


@right
def overlapping_calls_of_groups(rank: int, size: int) -> None:
    groups = [None, dist.new_group(range(size)), dist.new_group(range(size))]
    for _ in range(20):
        works = [dist.all_reduce(ones(), group=each, async_op=True) for each in groups[:: -1 if rank else 1]]
        for work in works:
            work.wait()


@right
def parts_of_the_ranks(rank: int, size: int) -> None:
    first = dist.new_group([0])
    for _ in range(5):
        if rank == 0:
            dist.all_reduce(ones(), group=first)
    dist.barrier()


@right
def different_lines(rank: int, size: int) -> None:
    if rank == 0:
        dist.all_reduce(ones())
    else:
        dist.all_reduce(ones())


@right
def late_rank(rank: int, size: int) -> None:
    time.sleep(0.2 * rank)
    dist.all_reduce(ones())


@right
def root_that_leaves(rank: int, size: int) -> None:
    dist.broadcast(ones(), 0)
    if rank == 0:
        os._exit(0)
    time.sleep(0.3)


@right
def groups_in_threads(rank: int, size: int) -> None:
    side = dist.new_group(range(size))

    def saves() -> None:
        for _ in range(50):
            dist.all_reduce(ones(), group=side)

    thread = threading.Thread(target=saves)
    thread.start()
    for _ in range(50):
        dist.all_reduce(ones())
    thread.join()


@right
def crossing_messages(rank: int, size: int) -> None:
    peers = [other for other in range(size) if other != rank]
    for _ in range(5):
        sent = [dist.isend(ones(), peer, tag=rank) for peer in peers]
        for peer in peers[::-1]:
            dist.recv(ones(), peer, tag=peer)
        for work in sent:
            work.wait()


@right
def batches_of_messages(rank: int, size: int) -> None:
    following, previous = (rank + 1) % size, (rank - 1) % size
    for _ in range(5):
        batch = [dist.P2POp(dist.irecv, ones(), previous), dist.P2POp(dist.isend, ones(), following)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()


@right
def late_message(rank: int, size: int) -> None:
    if rank == 0:
        # Longer than the time after which a cycle of waiting ranks counts as a deadlock.
        time.sleep(1.0)
    if rank > 0:
        dist.recv(ones(), rank - 1)
    if rank < size - 1:
        dist.send(ones(), rank + 1)


@right
def messages_of_threads(rank: int, size: int) -> None:
    def sends() -> None:
        # Until then, the ranks' main threads wait for each other for long enough to look deadlocked.
        time.sleep(1.5)
        dist.send(ones(), (rank + 1) % size)

    thread = threading.Thread(target=sends)
    thread.start()
    dist.recv(ones(), (rank - 1) % size)
    thread.join()


@right
def collective_of_a_thread(rank: int, size: int) -> None:
    side = dist.new_group(range(size))

    def saves() -> None:
        # Until then, the ranks wait for each other for long enough to look deadlocked.
        time.sleep(1.5)
        dist.all_reduce(ones(), group=side)

    if rank == 0:
        thread = threading.Thread(target=saves)
        thread.start()
        dist.all_reduce(ones())
        thread.join()
    else:
        dist.all_reduce(ones(), group=side)
        dist.all_reduce(ones())


@right
def messages_from_any_rank(rank: int, size: int) -> None:
    for _ in range(3):
        if rank == 0:
            for _ in range(1, size):
                source = dist.recv(ones())
                dist.send(ones(), source)
        else:
            dist.send(ones(), 0)
            dist.recv(ones(), 0)


@right
def forked_child(rank: int, size: int) -> None:
    dist.all_reduce(ones())
    if not (pid := os.fork()):
        alone = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
        alone.allreduce([ones()]).wait()
        os._exit(0)
    os.waitpid(pid, 0)
    dist.all_reduce(ones())


@right
def fake_tensors_on_one_rank(rank: int, size: int) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    # What the first call imports takes seconds, on all ranks alike.
    for _ in range(2 if rank == 0 else 1):
        with FakeTensorMode():
            dist.all_reduce(ones())
    dist.all_reduce(ones())


@right
def barrier_that_fails(rank: int, size: int) -> None:
    failed = dist.new_group(range(size))
    if rank != 1:
        with suppress(RuntimeError):
            dist.monitored_barrier(failed, timeout=timedelta(seconds=0.3))
            raise AssertionError("the barrier did not fail")
    dist.barrier()


@right
def group_of_no_processes(rank: int, size: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: F401

    fake = dist.new_group(range(size), backend="fake")
    if rank == 0:
        dist.all_reduce(ones(), group=fake)
    dist.all_reduce(ones())


@right
def closed_watch(rank: int, size: int) -> None:
    import unisono.interop.call_watch as module

    dist.barrier()
    if rank == 0 and module._watch is not None:
        module._watch.close()
        time.sleep(0.2)
    dist.all_reduce(ones())


@right
def ddp_training(rank: int, size: int) -> None:
    train(rank, 5, ddp())


@right
def ddp_with_joined_uneven_batches(rank: int, size: int) -> None:
    model = ddp()
    with torch.distributed.algorithms.Join([model]):
        train(rank, 5 - rank, model)


@right
def fsdp_training(rank: int, size: int) -> None:
    train(rank, 5, fsdp())


@right
def distributed_tensors(rank: int, size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    whole = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])
    whole.redistribute(mesh, [Replicate()])
    (whole @ torch.distributed.tensor.ones(4, 3, device_mesh=mesh)).sum().full_tensor()


# -- ranks -----------------------------------------------------------------------------------------
def named(program: str) -> Program:
    """Return a program, and import what it needs here: a rank that imports is late by seconds on a busy machine."""
    if program.startswith("fsdp") or program == distributed_tensors.__name__:
        # It imports torch.distributed.tensor too.
        importlib.import_module("torch.distributed.fsdp")
    if found := WRONG.get(program) or RIGHT.get(program):
        return found
    from torch_features import FEATURES

    return FEATURES[program]


def digest(result: object) -> str:
    """Return a hash of what a program returned, to the last bit of each tensor."""
    hashed = hashlib.sha256()
    for leaf in torch.utils._pytree.tree_leaves(result):
        if isinstance(leaf, torch.Tensor):
            hashed.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            leaf = leaf.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        hashed.update(leaf if isinstance(leaf, bytes) else repr(leaf).encode())
    return hashed.hexdigest()


def become(rank: int, given: argparse.Namespace, name: str, folder: Path) -> None:
    """Be a rank, and end with the status of a script."""
    out = os.open(folder / f"stderr {rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(out, 2)
    os.setsid()
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    status = 1
    check, _, program = name.rpartition(":")
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=given.ranks)
        if given.watch:
            watch(check=check or "after", timeout=LIMIT_S)
        result = named(program)(rank, given.ranks)
        (folder / f"result {rank}").write_text(digest(result))
        status = 0
    except SystemExit as error:
        status = error.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        # As the interpreter does before it runs the functions of atexit.
        sys.last_value = error
    finally:
        from multiprocessing.util import _exit_function

        with suppress(Exception):
            _exit_function()
        os._exit(status)


def outcome(given: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    """Run a program, and return what became of its ranks."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        began = time.monotonic()
        running: dict[int, int] = {}
        for rank in range(given.ranks):
            if not (pid := os.fork()):
                become(rank, given, name, folder)
            running[pid] = rank
        found: list[dict[str, Any]] = [{} for _ in range(given.ranks)]
        everyone = [*running]
        while running:
            over = time.monotonic() - began > HANGS_AFTER_S
            stopped = name.endswith("is_stopped") and len(running) == 1
            for pid, rank in list(running.items()):
                if over or stopped:
                    os.kill(pid, signal.SIGKILL)
                # An exit status can be read, by the watch too, until the process is reaped.
                ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | (0 if over or stopped else os.WNOHANG))
                if ended:
                    del running[pid]
                    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                    found[rank] = {"status": None if over else code, "seconds": time.monotonic() - began}
            time.sleep(0.01)
        for pid in everyone:
            os.waitpid(pid, 0)
        for rank, each in enumerate(found):
            each["stderr"] = (folder / f"stderr {rank}").read_text()
            result = folder / f"result {rank}"
            each["result"] = result.read_text() if result.exists() else None
        return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("programs", nargs="+")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--no-watch", dest="watch", action="store_false")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.programs:
        named(name.rpartition(":")[2])
        # A line for each: who reads them sees how far it came.
        print(json.dumps([name, outcome(given, name)]), flush=True)


if __name__ == "__main__":
    main()
