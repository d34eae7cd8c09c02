"""Pools of processes: functions by name and by value, and workers that are killed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import unisono as un

sys.path.append(str(Path(__file__).parents[1] / "unit"))
import pool_tasks as tasks


def test_a_killed_workers_tasks_are_done_by_others_with_one_result(tmp_path: Path) -> None:
    seen: list[int] = []
    with un.Pool(4, backend="shm") as pool:
        assert pool.submit(tasks.same_class, tasks.Point(1, 2)).result() == (True, tasks.Point(1, 2))
        assert list(pool.map(lambda x: x + tmp_path.name.count("x"), range(3))) == [0, 1, 2]
        futures = [pool.submit(tasks.kill_once, index, {103}, str(tmp_path)) for index in range(100, 120)]
        for future in futures:
            future.add_done_callback(lambda done: seen.append(done.result()))
        mapped = pool.starmap(tasks.kill_once, [(index, {25}, str(tmp_path)) for index in range(50)], chunksize=10)
        assert list(mapped) == [index * index for index in range(50)]
        assert [future.result() for future in futures] == sorted(seen) == [index * index for index in range(100, 120)]
        assert all((tmp_path / str(deadly)).read_text() == "xx" for deadly in (25, 103))
        with pytest.raises(un.errors.PeerLostError, match=r"call 0 of submit\(kill_always\) does not run again"):
            pool.submit(tasks.kill_always).result()
        with pytest.raises(un.pool.BrokenPoolError):
            pool.submit(tasks.square, 3).result()
