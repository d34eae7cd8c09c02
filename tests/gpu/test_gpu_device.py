"""The device itself, without unisono: what the other tests find on the fake device is believed only if it is right."""

from __future__ import annotations

import threading

import pytest
import torch
from gpu_devices import GPU

ROUNDS = 300


@pytest.mark.gpu
@pytest.mark.parametrize("other", ["same", "last"])
def test_memory_belongs_to_its_tensor_whatever_threads_do_on_devices(other: str) -> None:
    last = 0 if other == "same" else torch.accelerator.device_count() - 1
    devices = [torch.device(GPU, 0), torch.device(GPU, last)]
    meet = threading.Barrier(len(devices))
    overwritten = [0] * len(devices)

    def work(thread: int) -> None:
        # No thread makes its device the current one: tensors name theirs.
        for _ in range(ROUNDS):
            made = torch.arange(1024, dtype=torch.int32, device=devices[thread])
            torch.full_like(made, -1)
            meet.wait(60)
            overwritten[thread] += not torch.equal(torch.arange(1024, dtype=torch.int32, device=devices[thread]), made)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(len(devices))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert overwritten == [0, 0]
