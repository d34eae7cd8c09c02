"""Transports that take tensors on GPUs meet every check with them; ranks share a GPU if there are fewer than four."""

from __future__ import annotations

import pytest
import torch
from gpu_devices import GPU, TIMEOUT_S

from unisono.testing import TransportConformance, World

pytestmark = pytest.mark.gpu


class OnGpu(TransportConformance):
    device = GPU

    @property
    def world(self) -> World:
        return World(self.backend, timeout=TIMEOUT_S, device=self.device)


class TestThread(OnGpu):
    backend = "thread"


class TestShm(OnGpu):
    backend = "shm"


class TestGloo(OnGpu):
    backend = "gloo"


# With fewer GPUs there is test_gpu_calls, since the checks take four ranks.
if torch.cuda.device_count() >= 4:

    class TestNccl(OnGpu):
        backend = "nccl"
