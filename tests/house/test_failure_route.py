"""Functions and files between a rank's death and the `PeerLostError` of the ranks that waited for it.

Counted is each call of a Python function of ours, in every thread of a surviving rank, from the moment when the
control thread's `poll` reports the frame that tells of the death, to the moment when the caller's `except` has the
error with its text: reading the frame, the first cause, ending the native wait, and raising with context. Resumed
generators count as calls, as `sys.setprofile` sees them. Not counted are functions before that moment, which wait or
have nothing to do with the failure, and the control server's, which runs in another process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.host.native import native

pytestmark = pytest.mark.skipif(native() is None, reason="no compiler was here when unisono was installed")

MOST, MOST_FILES = 35, 12
RANKS, LOST = 3, 2

PROGRAM = """
import json, os, signal, sys, threading
from pathlib import Path
import torch
import unisono as un
from unisono.errors import PeerLostError

folder, rank, size, lost = Path(sys.argv[1]), *map(int, sys.argv[2:5])
ours, called = str(Path(un.__file__).parent), []

def note(frame, event, argument):
    if event == "c_return" and argument.__name__ == "poll":
        if threading.current_thread().name == "unisono control client":
            called.clear()
    elif event == "call" and frame.f_code.co_filename.startswith(ours):
        called.append((threading.current_thread().name, frame.f_code.co_filename, frame.f_code.co_qualname))

def waiting(told):
    groups = [] if told is None else told["groups"]
    return any(group["inside"] and group["for_s"] > 0.2 for group in groups)

# Also of the control thread, which `init` starts.
threading.setprofile(note)
comm = un.init("shm", init_method=f"file://{folder}/meeting", rank=rank, world_size=size, timeout=60)
comm.barrier()
if rank == lost:
    control, others = comm._engine.control, [("world1", each) for each in range(size) if each != lost]
    while not all(map(waiting, map(control.query(comm._engine.group, 1.0).get, others))):
        pass
    os.kill(os.getpid(), signal.SIGKILL)
try:
    sys.setprofile(note)
    comm.all_reduce(torch.ones(2))
except PeerLostError as error:
    text = str(error)
    sys.setprofile(None)
    threading.setprofile(None)
    print(json.dumps([text, error.peer, called]), flush=True)
# Rank 0 serves the control plane until the others know.
sys.stdin.read()
os._exit(0)
"""


def test_lost_rank_takes_few_functions(tmp_path: Path) -> None:
    start = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    ranks = [
        subprocess.Popen(
            [*start, str(rank), str(RANKS), str(LOST)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for rank in range(RANKS)
    ]
    printed = {rank: ranks[rank].communicate(timeout=60)[0] for rank in (1, 0, LOST)}
    text, peer, called = json.loads(printed[1])
    assert peer == LOST
    assert text.startswith(f"rank 1 of {RANKS}, all_reduce #2 of world1: rank {LOST} was lost: its process ended")
    listed = "\n".join(f"{thread}: {Path(file).name} {name}" for thread, file, name in called)
    assert len(called) <= MOST, f"{len(called)} functions:\n{listed}"
    assert len({file for _, file, _ in called}) <= MOST_FILES, listed
