"""A rank's reports to the monitor, with and without shared memory between them."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

import pytest

from unisono import serialization
from unisono.control import call_monitor
from unisono.control.call_monitor import CallControl
from unisono.control.server import ControlServer
from unisono.control.watched_calls import CALL, WatchedCalls
from unisono.core.call import Fingerprint, hash_of
from unisono.core.failure import Cause
from unisono.core.group import Group


def exhausted(name: str, nbytes: int) -> AbstractContextManager[bytes]:
    raise OSError("too many open files")


@pytest.mark.parametrize("memory", [True, False])
def test_calls_are_compared_with_and_without_shared_memory(monkeypatch: pytest.MonkeyPatch, memory: bool) -> None:
    if not memory:
        monkeypatch.setattr(call_monitor, "create_file", exhausted)
    server = ControlServer(b"a secret", state=WatchedCalls)
    controls = [CallControl(server.address, b"a secret", 10.0) for _ in range(2)]
    failures: list[Cause] = []
    for rank, control in enumerate(controls):
        control.attend(Group.world(rank, 2, "w"), failures.append, os.getpid())
        control.tell("group", "w", "world", [0, 1], 10.0)
    for rank, control in enumerate(controls):
        made = Fingerprint(0, "all_reduce", "sum", None, "torch.float32", (4 + rank,))
        control.tell("signature", 0, serialization.encode(made.values()))
        control.call(CALL.pack(0, 1, hash_of(made._replace(op=None).compared()), 0, 0))
        assert control.settle() == (rank == 1)
    for control in controls:
        control.close()
    server.close()
    assert {cause.kind for cause in failures} == {"MismatchError"}
