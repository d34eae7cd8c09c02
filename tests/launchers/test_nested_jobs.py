"""Jobs inside jobs: an inner job is a world of its own, or one quick error names the variables; no ranks are mixed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launcher_helpers import is_running
from waiting import wait_until

import unisono as un

BIN = Path(sys.executable).parent
LAUNCHERS = {
    "run": [sys.executable, "-m", "unisono", "run", "--no-prefix", "-n", "2"],
    "torchrun": [str(BIN / "torchrun"), "--nproc-per-node", "2"],
    "mpirun": [str(BIN / "mpirun"), "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable],
}
INNER = """
import sys, torch, unisono as un

def tell(*words):
    # In one write, because ranks of torchrun share the output.
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()

try:
    with un.init(timeout=60) as comm:
        x = torch.tensor([int(sys.argv[1])])
        comm.all_reduce(x)
        tell("inner", sys.argv[1], comm.rank, comm.size, x.item())
except Exception as error:
    tell("inner", sys.argv[1], type(error).__name__, str(error).replace("\\n", " "))
"""
OUTER = """
import json, os, socket, subprocess, sys, unisono as un
with un.init(timeout=60) as comm:
    command, how = json.loads(sys.argv[1]), sys.argv[2]
    places = [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    if how == "torchrun":
        command[1:1] = ["--master-port", port]
    if how == "hand":
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        places = [{**place, "RANK": str(rank)} for rank in range(2)]
    command += ["inner.py", str(100 ** comm.rank)]
    # An error of the variables is the same on all ranks.
    if how == "plain" and comm.rank > 0:
        places = []
    children = [subprocess.Popen(command, env={**os.environ, **place}, stdout=-1, text=True) for place in places]
    said = "".join(child.communicate(timeout=300)[0] for child in children)
    print("".join(line + "\\n" for line in said.splitlines() if line.startswith("inner")), end="", flush=True)
    comm.barrier(timeout=100)
"""
PAIRS = [("run", inner) for inner in ("plain", "run", "torchrun", "mpirun", "hand")]
PAIRS += [("torchrun", inner) for inner in ("plain", "run", "torchrun", "hand")]
PAIRS += [("mpirun", inner) for inner in ("plain", "run", "torchrun", "mpirun", "hand")]


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("outer", "inner"), PAIRS)
def test_inner_job_is_a_world_of_its_own(tmp_path: Path, outer: str, inner: str) -> None:
    (tmp_path / "inner.py").write_text(INNER)
    (tmp_path / "outer.py").write_text(OUTER)
    command = str(LAUNCHERS.get(inner, [sys.executable])).replace("'", '"')
    words = [*LAUNCHERS[outer], "outer.py", command, inner]
    ended = subprocess.run(words, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert ended.returncode == 0, ended.stderr
    lines = sorted(line[line.index("inner") :] for line in ended.stdout.splitlines() if "inner" in line)
    if inner == "plain" or (outer, inner) == ("run", "mpirun"):
        names = "OMPI_COMM_WORLD_RANK=" if outer == "mpirun" else "RANK="
        assert lines
        assert all("ValueError this process has inherited " + names in line for line in lines)
    else:
        expected = [f"inner {tag} {rank} 2 {2 * tag}" for tag in (1, 100) for rank in range(2)]
        assert lines == sorted(expected)


def test_port_of_an_outer_job_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    from unisono.bootstrap.env import check
    from unisono.bootstrap.rendezvous import InitRequest

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "host", "MASTER_PORT": "5000"}.items():
        monkeypatch.setenv(name, value)
    for port, expected in {"6000": 6000, "6000/5000": 6000, "6000/5001": 5000, "": 5000}.items():
        monkeypatch.setenv("UNISONO_PORT", port)
        assert check(InitRequest(None, None, None, 0.0, None)) == ("host", expected)


@pytest.mark.parametrize("how", ["succeed", "fail"])
def test_children_end_with_the_ranks_of_launch(tmp_path: Path, how: str) -> None:
    if how == "fail":
        with pytest.raises(KeyError):
            un.launch(start_child, 2, "gloo", (str(tmp_path), how))
    else:
        un.launch(start_child, 2, "gloo", (str(tmp_path), how))
    children = [int(path.read_text()) for path in tmp_path.glob("child-*")]
    assert len(children) == 2
    assert wait_until(lambda: not any(map(is_running, children)))


def start_child(comm: un.Communicator, folder: str, how: str) -> Any:
    child = subprocess.Popen(["sleep", "1000"])
    (Path(folder) / f"child-{comm.rank}").write_text(str(child.pid))
    comm.barrier()
    if how == "fail" and comm.rank == 1:
        raise KeyError("lr")
    return os.getpid()
