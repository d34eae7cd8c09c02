"""Calls that differ, ranks that are late or die: each ends in a sentence."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch_ranks import SHORT, message, on_ranks, summed

import unisono as un
from unisono.testing import pool


def mismatches() -> list[str]:
    """Each in a group of its own, which it breaks."""
    rank = dist.get_rank()
    calls: list[Callable[[Any], object]] = [
        lambda group: dist.all_reduce(torch.ones(2, dtype=(torch.float32, torch.float64)[rank]), group=group),
        lambda group: dist.all_reduce(torch.ones(2), (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[rank], group=group),
        lambda group: dist.broadcast(torch.ones(2), rank, group=group),
        lambda group: (dist.barrier, dist.all_reduce)[rank](*([torch.ones(2)] if rank else []), group=group),
        lambda group: dist.all_reduce(torch.ones(2 + rank), group=group, async_op=True).wait(),
    ]
    return [message(lambda call=call: call(dist.new_group(timeout=timedelta(seconds=5)))) for call in calls]


def test_mismatched_calls_fail_on_every_rank(tmp_path: Path) -> None:
    for said in on_ranks(mismatches, 2, tmp_path):
        assert [text.split(":")[0] for text in said] == ["MismatchError"] * 5
        assert [
            text
            for text, what in zip(said, ("dtype", "op", "root", "operation", "counts"), strict=True)
            if what not in text
        ] == []
        # Other threads make asynchronous calls, which are the user's all the same.
        assert said[-1].count(",)) at test_torch_failures.py:") == 2, said[-1]


# -- time and death --------------------------------------------------------------------------------
def late() -> list[str]:
    group = dist.new_group(timeout=SHORT)
    dist.barrier(group)
    t = torch.ones(2)
    if dist.get_rank() == 1:
        dist.recv(t, 0)
        return []
    said = [
        message(lambda: dist.all_reduce(t, group=group)),
        message(lambda: dist.all_reduce(t, group=group, async_op=True).wait()),
        message(lambda: dist.all_reduce(t, group=group, async_op=True).get_future().wait()),
    ]
    dist.send(t, 1)
    return said


def test_missing_rank_is_named_before_the_timeout(tmp_path: Path) -> None:
    said = on_ranks(late, 2, tmp_path)[0]
    assert [bool(re.search(r"waited \d\.\d s for rank 1", text)) for text in said] == [True] * 3
    assert [text.split(":")[0] for text in said] == ["CommTimeoutError", "CommTimeoutError", "RuntimeError"]
    # Once, and in the sentence, before the lines about each rank.
    words = r"\[torch: Timed out waiting; timed out after (\d+ms|the limit); wait timeout after \1\]"
    assert [len(re.findall(words, text.partition("\n")[0])) for text in said] == [1] * 3


def monitored(limit: timedelta) -> str:
    group, t = dist.new_group(), torch.ones(1)
    group.monitored_barrier(timedelta(seconds=10))
    if dist.get_rank():
        dist.broadcast(t, 0)
        return ""
    said = message(lambda: group.monitored_barrier(limit))
    dist.broadcast(t, 0)
    return said


@pytest.mark.parametrize("limit", [SHORT, timedelta(0)])
def test_monitored_barrier_names_all_missing_ranks(limit: timedelta, tmp_path: Path) -> None:
    said = on_ranks(monitored, 3, tmp_path, limit)[0]
    assert "rank 1 (and 2)" in said
    assert f"waited {limit.total_seconds():.1f} s" in said
    assert "[torch: Timed out waiting; " in said


def dies() -> list[object]:
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    work = dist.all_reduce(torch.ones(10), async_op=True)
    said = [message(work.get_future().wait), message(work.wait), message(dist.barrier)]
    calls = [lambda: dist.send(torch.ones(1), 1), lambda: dist.recv(torch.ones(1), 1)]
    return [*said, *map(message, calls), time.monotonic() - started]


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_dead_rank_is_reported_to_the_others(tmp_path: Path, transport: str) -> None:
    found, dead = on_ranks(dies, 2, tmp_path, transport=transport, on_failure="continue")
    assert isinstance(dead, un.errors.PeerLostError)
    first, *others, waited_s = found
    assert "rank 1 was lost" in first
    assert {text.partition(":")[0] for text in others} == {"PeerLostError"}
    assert [text.count("[torch: Connection closed by peer]") for text in (first, *others)] == [1] * 5
    assert waited_s < 5


def late_to_join(comm: un.Communicator, path: str) -> str:
    if comm.rank == 1:
        return ""
    how: dict[str, Any] = {"init_method": f"file://{path}", "rank": 0, "world_size": 2}
    limit = timedelta(milliseconds=10)
    return message(lambda: dist.init_process_group("unisono", timeout=limit, **how))


def test_rank_that_does_not_join_is_a_timeout_in_words_of_torch(tmp_path: Path) -> None:
    said, _ = pool("thread", 2).run(late_to_join, str(tmp_path / "store"))
    assert "rank 1 has not joined within 0.01 s" in said
    assert "[torch: Timed out waiting; timed out after 10ms; wait timeout after 10ms]" in said


def leaves_without_a_word(comm: un.Communicator, path: str) -> float:
    dist.init_process_group("unisono", init_method=f"file://{path}", rank=comm.rank, world_size=comm.size)
    return summed()


def test_program_may_end_without_destroy_process_group(tmp_path: Path) -> None:
    assert un.launch(leaves_without_a_word, 2, "shm", (str(tmp_path / "store"),), timeout=20) == [11.0, 11.0]


@pytest.mark.ranks(2, torch=True)
def test_messages_go_by_the_names_of_torch() -> None:
    """Torch's `send` is an `isend` and a `wait`, which is nothing that its user has called."""
    if dist.get_rank() == 0:
        for call in (lambda: dist.recv(torch.ones(1), src=1), lambda: dist.send(torch.ones(1), dst=1)):
            with pytest.raises(RuntimeError) as raised:
                call()
            assert re.search(r"\b(send|recv) #\d of ", str(raised.value))
            assert "isend" not in str(raised.value)
            assert "irecv" not in str(raised.value)
