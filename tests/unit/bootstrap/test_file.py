"""file://: empty files, old files, files of living runs, and files that are something else."""

from __future__ import annotations

import queue
import socket
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bootstrap_helpers import SOON, meet
from waiting import run_concurrently, wait_until

from unisono.bootstrap import Rendezvous, find
from unisono.control.client import SocketControl
from unisono.control.server import ControlServer
from unisono.errors import CommError, CommTimeoutError

pytestmark = pytest.mark.usefixtures("nobody_started_us")

Start = Callable[..., "subprocess.Popen[str]"]


def test_empty_file_is_used_and_left_empty(tmp_path: Path) -> None:
    path = tmp_path / "made by the user"
    path.touch()
    places = meet(f"file://{tmp_path}/made%20by%20the%20user", 2)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for place in places:
        place.close()
    assert path.read_text() == ""
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["a#b", "a?b", "50% a%20b", "a b"])
def test_paths_are_used_verbatim(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    for url in (f"file://{folder}/{name}", (folder / name).as_uri()):
        places = meet(url, 2)
        (held,) = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert held.parent == folder
        assert held.name in (name, name.replace("%20", " "))
        for place in places:
            place.close()


def test_file_replaced_by_another_rank_0_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "meet"
    other = f"unisono meets here\n127.0.0.1\n9\nits secret\n{socket.gethostname()}\n"

    def take_over() -> None:
        assert wait_until(path.exists, SOON)
        path.write_text(other)

    first, _ = run_concurrently(lambda: find(f"file://{path}", 0, 2, 1.0), take_over)
    assert isinstance(first, CommTimeoutError)
    assert any(f"Another process has written {path} since" in note for note in first.__notes__)
    assert path.read_text() == other


def test_file_of_a_dead_run_is_replaced(tmp_path: Path, port: int) -> None:
    path = tmp_path / "meet"
    path.write_text(f"unisono meets here\n127.0.0.1\n{port}\nold secret\n{socket.gethostname()}\n")
    path.chmod(0o600)
    with pytest.raises(
        CommTimeoutError,
        match=r"rank 0 was not reached through .*the address in it does not "
        "work.*no answer from",
    ):
        find(f"file://{path}", 1, 2, 0.3)
    for place in meet(f"file://{path}", 3):
        place.close()


def test_file_of_a_running_job_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "meet"
    old = ControlServer(b"old secret")
    path.write_text(f"unisono meets here\n127.0.0.1\n{old.address[1]}\nold secret\n{socket.gethostname()}\n")
    path.chmod(0o600)
    seated: queue.SimpleQueue[str] = queue.SimpleQueue()
    real = SocketControl.register_rank

    def watched(self: SocketControl, *arguments: Any) -> str:
        name = real(self, *arguments)
        seated.put(name)
        return name

    def first() -> Rendezvous:
        # Rank 1 sits at the old server already.
        assert seated.get(timeout=SOON) == "world1"
        return find(f"file://{path}", 0, 2, SOON)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SocketControl, "register_rank", watched)
        places = run_concurrently(first, lambda: find(f"file://{path}", 1, 2, SOON))
    assert [place.rank for place in places] == [0, 1]
    for place in places:
        place.close()
    old.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_unrelated_files_are_rejected(tmp_path: Path, rank: int) -> None:
    path = tmp_path / "thesis.tex"
    path.write_text("ten years of work\n")
    with pytest.raises(ValueError, match="was not written by unisono and is left unchanged"):
        find(f"file://{path}", rank, 2, 1.0)
    assert path.read_text() == "ten years of work\n"
    with pytest.raises(CommError, match="cannot read"):
        find(f"file://{tmp_path}", rank, 2, 1.0)


def test_files_writable_by_others_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "meet"
    path.write_text("unisono meets here\n127.0.0.1\n1\nsecret\nhost\n")
    path.chmod(0o644)
    with pytest.raises(CommError, match="is open to other users"):
        find(f"file://{path}", 1, 2, 1.0)


def test_files_of_another_host(tmp_path: Path) -> None:
    path = tmp_path / "meet"
    path.write_text("unisono meets here\n127.0.0.1\n1\nsecret\nelsewhere\n")
    path.chmod(0o600)
    with pytest.raises(CommTimeoutError, match="written on elsewhere: for ranks of several hosts use tcp://"):
        find(f"file://{path}", 1, 2, 0.1)
