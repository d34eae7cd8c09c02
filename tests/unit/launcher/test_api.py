"""`launch` on processes: where programs come from, how ranks fail, and that nothing is left."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
import traceback
import types
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from printed import printed
from waiting import wait_until

import unisono as un


def square(comm: un.Communicator, x: int = 3) -> int:
    return comm.rank * x


def raise_on_1(comm: un.Communicator) -> None:
    if comm.rank == 1:
        raise KeyError("boom")
    comm.all_reduce(torch.ones(3))


def receive_from_failing(comm: un.Communicator) -> None:
    if comm.rank == 1:
        raise KeyError("boom")
    comm.recv(torch.ones(3), src=1)


def die_on_1(comm: un.Communicator) -> str:
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(un.errors.PeerLostError, match="rank 1 was lost") as caught:
        comm.all_reduce(torch.ones(1 << 20), algorithm="ring")
    assert caught.value.peer == 1
    # The timeout is 20 s.
    assert time.monotonic() - started < 15
    with pytest.raises(un.errors.PeerLostError, match="rank 1 was lost"):
        comm.barrier()
    return "survived"


def never_comes(comm: un.Communicator) -> None:
    if comm.rank == 1:
        time.sleep(60)
    comm.all_reduce(torch.ones(3), timeout=0.5)


def test_results_are_ordered_by_rank() -> None:
    assert un.launch(square, 3, "gloo", args=(5,)) == [0, 5, 10]
    assert un.launch(square, 2, "gloo", kwargs={"x": 2}) == [0, 2]


def test_unimportable_function_is_sent_by_value() -> None:
    offset = 7
    assert un.launch(lambda comm: comm.rank + offset, 2, "gloo") == [7, 8]


def test_tensors_are_returned() -> None:
    first, second = un.launch(lambda comm: torch.full((2,), comm.rank), 2, "gloo")
    assert first.tolist() == [0, 0]
    assert second.tolist() == [1, 1]


@pytest.mark.parametrize("backend", ["thread", "gloo"])
@pytest.mark.parametrize("program", [raise_on_1, receive_from_failing])
def test_first_error_is_raised_with_its_ranks_traceback(backend: str, program: object) -> None:
    with pytest.raises(KeyError, match="boom") as caught:
        un.launch(program, 3, backend, timeout=20)
    assert "raised on rank 1 of 3" in caught.value.__notes__
    assert program.__name__ in "".join(traceback.format_tb(caught.value.__traceback__))


def test_survivors_results_are_returned_on_request() -> None:
    results = un.launch(die_on_1, 3, "gloo", timeout=20, on_failure="continue")
    assert results[0] == results[2] == "survived"
    assert isinstance(results[1], un.errors.PeerLostError)
    assert "SIGKILL" in str(results[1])


def test_killed_rank_is_named() -> None:
    with pytest.raises(un.errors.PeerLostError, match="rank 1 of 3 was ended by SIGKILL") as caught:
        un.launch(die_on_1, 3, "gloo", timeout=20)
    assert caught.value.peer == 1


def test_rank_that_never_joins_is_named_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.launcher.supervisor.GRACE_S", 0.5)
    # The first rank of a test run waits for the forkserver, which imports torch.
    un.launch(print, 1, "gloo")
    started = time.monotonic()
    with pytest.raises(un.errors.CommTimeoutError, match="rank 1") as caught:
        un.launch(never_comes, 2, "gloo")
    assert caught.value.operation == "all_reduce"
    # Rank 1 sleeps for a minute.
    assert 1.0 < time.monotonic() - started < 40


def test_results_that_cannot_be_pickled_are_named() -> None:
    with pytest.raises(TypeError, match="result of rank 0"):
        un.launch(lambda comm: (x for x in [1]), 1, "gloo")


def test_current_environment_reaches_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_TEST_WORD", "now")
    assert un.launch(lambda comm: os.environ.get("UNISONO_TEST_WORD"), 1, "gloo") == ["now"]


def draw(_comm: un.Communicator) -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(1).item()


def test_ranks_draw_different_numbers_unless_they_are_seeded() -> None:
    first, second = un.launch(draw, 2, "shm")
    assert not set(first) & set(second)


def test_ranks_inherit_the_output(capfd: pytest.CaptureFixture[str]) -> None:
    un.launch(lambda comm: print("hello from", comm.rank), 2, "gloo")
    assert sorted(printed(capfd.readouterr().out)) == ["hello from 0", "hello from 1"]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"nprocs": 0}, ValueError, "positive"),
        ({"backend": "gluu"}, ValueError, "known: .*gloo.*thread"),
        ({"timeout": 0}, ValueError, "seconds"),
        ({"timeout": float("inf")}, ValueError, "from 0 to 1e9 seconds"),
        ({"timeout": timedelta(0)}, ValueError, "positive"),
        ({"timeout": "60"}, TypeError, "number of seconds or a timedelta"),
        ({"on_failure": "ignore"}, ValueError, "'end' or 'continue'"),
        ({"fn": 3}, TypeError, "function"),
        ({"chunk_bytes": 0}, ValueError, "chunk_bytes"),
        ({"threads": 0}, ValueError, "threads"),
        ({"check": "sometimes"}, ValueError, "'auto', 'full' or 'off'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        un.launch(**{"fn": square, "nprocs": 2, "backend": "thread", **arguments})


SCRIPT = """
    import sys, torch, unisono as un
    seen = []
    def register(f):
        seen.append(f.__name__)
        return f
    @register
    def program(comm, module):
        return comm.rank, seen, module(torch.ones(2)).tolist()
    if __name__ == "__main__":
        assert un.launch(program, 2, "gloo", args=(torch.nn.Identity(),)) == [
            (0, ["program"], [1.0, 1.0]), (1, ["program"], [1.0, 1.0])]
        print("done")
"""


@pytest.mark.soak
@pytest.mark.parametrize("way", ["pipe", "-c"])
def test_launch_from_pipe_and_command_line(way: str) -> None:
    text = textwrap.dedent(SCRIPT)
    ran = subprocess.run(
        [sys.executable, *{"pipe": ["-"], "-c": ["-c", text]}[way]],
        input=text if way == "pipe" else None,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, printed(ran.stdout)) == (0, ["done"]), ran.stderr


# A second launch of the script, which does not live to flush what it has printed.
WAITS = """
    import os, time
    def wait(comm):
        pids = comm.all_gather_object(os.getpid())
        if comm.rank == 0:
            print(*pids, flush=True)
        time.sleep(600)
    if __name__ == "__main__":
        sys.stdout.flush()
        un.launch(wait, 2, "gloo")
"""


@pytest.mark.slow("a script and the server that forks its ranks import torch, one after the other")
def test_launch_from_a_script_with_which_ranks_end(tmp_path: Path) -> None:
    path = tmp_path / "script with spaces.py"
    path.write_text(textwrap.dedent(SCRIPT) + textwrap.dedent(WAITS))
    with subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        lines = []
        # Lines that torch 2.8 prints on two ranks at the same time are torn.
        while not re.fullmatch(r"\d+ \d+\n", line := parent.stdout.readline()):
            assert line, parent.communicate(timeout=300)
            lines.append(line)
        assert printed("".join(lines)) == ["done"]
        parent.kill()
    pids = [int(word) for word in line.split()]
    assert wait_until(lambda: not any(map(_alive, pids)), 10)


UNGUARDED = """
    import unisono as un
    try:
        un.launch(print, 2, "gloo")
    except un.CommError as error:
        with open(__file__ + " said", "a") as file:
            print(error, file=file)
        raise
"""


def test_script_without_a_main_guard_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = types.ModuleType("__main__")
    script.__file__ = str(tmp_path / "script.py")
    Path(script.__file__).write_text(textwrap.dedent(UNGUARDED))
    monkeypatch.setitem(sys.modules, "__main__", script)
    with pytest.raises(un.errors.PeerLostError, match="must do so under if __name__ == '__main__':"):
        un.launch(print, 2, "gloo")
    # A rank imports the main script, and prints its error where this process did when the first rank was started.
    assert "put the call under if __name__ == '__main__':" in (tmp_path / "script.py said").read_text()


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
