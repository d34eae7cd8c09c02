"""New ranks join the survivors of a group, and receive the state of the training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch
from recovery_helpers import launched, soaked, total

import unisono as un
from unisono.errors import CommError

NEWCOMER = """
import sys, torch
import unisono as un
comm = un.join(pid=int(sys.argv[1]), timeout=20)
tensor = torch.ones(1)
comm.all_reduce(tensor)
print(comm.rank, comm.size, comm.backend, tensor.item(), flush=True)
comm.close()
"""


@pytest.mark.parametrize("backend", ["tcp", soaked("shm"), soaked("gloo"), soaked("shm+tcp")])
def test_new_rank_replaces_a_dead_one(backend: str) -> None:
    def program(comm: Any) -> tuple[int, int, float, str]:
        pid = os.getpid()
        if comm.rank == 1:
            os.kill(pid, signal.SIGKILL)
        newcomer = None
        if comm.rank == 0:
            newcomer = subprocess.Popen([sys.executable, "-c", NEWCOMER, str(pid)], stdout=subprocess.PIPE, text=True)
        try:
            comm.barrier()
        except CommError:
            comm = comm.rebuild(grow=1, timeout=30)
        found = comm.rank, comm.size, total(comm)
        return *found, newcomer.communicate(timeout=30)[0] if newcomer is not None else ""

    ends = launched(program, 3, backend)
    assert ends[0] == (0, 3, 3.0, f"2 3 {backend} 3.0\n")
    assert ends[2] == (1, 3, 3.0, "")


def test_join_without_a_group() -> None:
    with pytest.raises(ValueError, match="either an init_method"):
        un.join()
    with pytest.raises(ValueError, match="unknown init_method"):
        un.join("udp://x:1")
    with (
        subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other,
        pytest.raises(CommError, match="is in no unisono job"),
    ):
        un.join(pid=other.pid)


TRAINEE = """
import sys, torch
import unisono as un
comm = un.join(pid=int(sys.argv[1]), timeout=30)
model = torch.nn.Linear(1, 1)
sampler = un.data.PartitionSampler(range(12), num_replicas=1, rank=0)
training = un.elastic.Recovery(comm, model=model, sampler=sampler)
training.join()
print(training.step, model.weight.item(), sorted(sampler), flush=True)
training.comm.close()
"""


def test_new_rank_receives_model_and_remaining_samples() -> None:
    def program(comm: Any) -> tuple[int, float, list[int], str]:
        model = torch.nn.Linear(1, 1)
        with torch.no_grad():
            model.weight.fill_(7.0)
        sampler = un.data.PartitionSampler(range(12), comm)
        training = un.elastic.Recovery(comm, model=model, sampler=sampler)
        used = list(sampler)[:3]
        training.commit(3)
        newcomer = None
        if comm.rank == 0:
            command = [sys.executable, "-c", TRAINEE, str(os.getpid())]
            newcomer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        training.recover(grow=1, timeout=30)
        left = sorted(sampler)
        said = newcomer.communicate(timeout=30)[0] if newcomer is not None else ""
        return training.step, model.weight.item(), used + left, said

    first, second = launched(program, 2, "shm")
    step, weight, samples = first[3].split(" ", 2)
    assert (step, weight) == ("1", "7.0")
    assert sorted([*first[2], *second[2], *eval(samples)]) == list(range(12))
