"""A recorded rank runs again alone, with the same bits; what it does differently is found at the first call."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded_programs import apart, equal, flipped, model_of, plain, program, weights

import unisono as un
from unisono.errors import CommError, CommTimeoutError, MismatchError, PeerLostError, UnavailableError
from unisono.recording.log import Log, LogWriter
from unisono.testing import pool
from unisono.tools.cli import main

RANKS = 3


def check_seeds(backend: str, seeds: Iterable[int], folder: Path) -> None:
    for seed in seeds:
        here = folder / str(seed)
        results = pool(backend, RANKS, timeout=200.0).run(apart, program, here, seed)
        for rank, result in enumerate(results):
            assert equal(un.replay(here, rank, program, (here, seed)), result), f"rank {rank} of seed {seed}"


@pytest.mark.parametrize(("backend", "seeds"), [("shm", (0, 1, 2)), ("tcp", (0, 2)), ("gloo", (0, 1))])
def test_random_programs_are_the_same_alone(backend: str, seeds: Iterable[int], tmp_path: Path) -> None:
    check_seeds(backend, seeds, tmp_path)


def test_a_log_holds_the_bytes_of_tensors_that_it_must_copy(tmp_path: Path) -> None:
    log = LogWriter(tmp_path / "rank0.record")
    given = [torch.full((300, 200), float(number)).t() for number in range(3)]
    log.put(("call",), None, given)
    log.close()
    entry = Log(tmp_path / "rank0.record").take(("call",))
    assert entry is not None
    found = [torch.empty(200, 300) for _ in given]
    entry.copy_to(found)
    assert equal(found, given)


@pytest.mark.soak
def test_a_hundred_ranks_are_the_same_alone(tmp_path: Path) -> None:
    check_seeds("shm", range(100, 134), tmp_path)


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_recorded_results_are_those_without_a_recording(backend: str, tmp_path: Path) -> None:
    ranks = pool(backend, RANKS, timeout=200.0)
    assert equal(ranks.run(plain, None), ranks.run(apart, plain, tmp_path))


def test_flipped_bit_is_found_at_the_first_call_that_sends_it(tmp_path: Path) -> None:
    assert pool("shm", 2, timeout=200.0).run(apart, flipped, tmp_path, None) == [5, 5]
    assert un.replay(tmp_path, 1, flipped, (tmp_path, None)) == 5
    for step in range(5):
        with pytest.raises(MismatchError, match=rf"all_reduce #{step + 1} of .*, at \S+: this rank sends other bytes"):
            un.replay(tmp_path, 1, flipped, (tmp_path, step))


def other_calls(comm: un.Communicator, folder: Path, change: str) -> None:
    with un.record(folder, comm):
        x = torch.zeros(4, dtype=torch.float64 if change == "dtype" else torch.float32)
        if change == "operation":
            comm.broadcast(x, 0)
        else:
            comm.all_reduce(x, "max" if change == "op" else "sum")
        if change != "count":
            comm.barrier()
        to = (comm.rank + (2 if change == "peer" else 1)) % comm.size
        sent = torch.ones(2 if change == "length" else 1)
        comm.sendrecv(sent, to, torch.zeros(1), (comm.rank - 1) % comm.size)
        if change == "more":
            comm.barrier()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("dtype", "all_reduce #1 of .*: dtype was float32, and is float64"),
        ("operation", "broadcast #1 of .*: operation was all_reduce, and is broadcast"),
        ("op", "all_reduce #1 of .*: op was sum, and is max"),
        ("peer", "a message to rank 0, tag 0 was not recorded"),
        ("length", "a message to rank 2, tag 0: 1 elements of torch.float32 were sent at .*, and now 2 elements"),
    ],
)
def test_another_call_is_named(change: str, text: str, tmp_path: Path) -> None:
    run_apart(other_calls, tmp_path, "none")
    un.replay(tmp_path, 1, other_calls, (tmp_path, "none"))
    with pytest.raises(MismatchError, match=text):
        un.replay(tmp_path, 1, other_calls, (tmp_path, change))


def test_replay_ends_where_the_recording_ends(tmp_path: Path) -> None:
    run_apart(other_calls, tmp_path, "none")
    assert un.replay(tmp_path, 0, other_calls, (tmp_path, "more")) is None


def run_apart(run: Callable[..., Any], *args: Any) -> list[Any]:
    return pool("thread", RANKS, timeout=30.0).run(apart, run, *args)


def stepping(comm: un.Communicator, folder: Path, seen: Path) -> None:
    un.record(folder, comm, steps=2)
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        model(torch.ones(1, 6)).sum().backward()
        un.average_gradients(model, comm)
        optimizer.step()
        with seen.open("a") as file:
            file.write("step ")


def test_steps_end_a_recording(tmp_path: Path) -> None:
    pool("shm", 2, timeout=200.0).run(apart, stepping, tmp_path, tmp_path / "recorded")
    assert un.replay(tmp_path, 1, stepping, (tmp_path, tmp_path / "replayed")) is None
    assert (tmp_path / "replayed").read_text() == "step step "


def stepping_beside_hooks(comm: un.Communicator, folder: Path) -> int:
    """Train past the end of the recording while torch iterates over other hooks, too."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    seen = []
    with un.record(folder, comm, steps=2):
        handle = register_optimizer_step_post_hook(lambda *_: seen.append(comm.rank))
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(4):
            model(torch.ones(1, 6)).sum().backward()
            un.average_gradients(model, comm)
            optimizer.step()
        # Ranks that are threads share torch's hooks: no rank iterates over them any more.
        comm.barrier()
        handle.remove()
    return seen.count(comm.rank)


@pytest.mark.parametrize("backend", ["thread", "shm"])
def test_a_recording_that_ends_in_a_step_ends_no_training(backend: str, tmp_path: Path) -> None:
    counts = pool(backend, 3, timeout=30.0).run(apart, stepping_beside_hooks, tmp_path)
    assert all(count >= 4 for count in counts)


def killed(comm: un.Communicator, folder: Path) -> str:
    un.record(folder, comm)
    comm.barrier()
    if comm.rank == 1 and not folder.joinpath("again").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        comm.all_reduce(torch.ones(2))
    except PeerLostError as error:
        return f"rank {error.peer} was lost"
    return "all are here"


def test_recording_outlives_its_process(tmp_path: Path) -> None:
    ends = un.launch(killed, 2, "shm", args=(tmp_path,), on_failure="continue")
    assert ends[0] == "rank 1 was lost"
    assert un.replay(tmp_path, 0, killed, (tmp_path,)) == "rank 1 was lost"
    (tmp_path / "again").touch()
    with pytest.raises(MismatchError, match=r"all_reduce #2 of world was not recorded, or had not ended when"):
        un.replay(tmp_path, 1, killed, (tmp_path,))


def loaded(comm: un.Communicator, folder: Path, checkpoint: Path) -> list[torch.Tensor]:
    with un.record(folder, comm):
        model = model_of()
        un.checkpoint.load(checkpoint, {"model": model}, comm)
        un.GradientAverager(model, comm)
        model(torch.ones(2, 6)).sum().backward()
        return [p.grad for p in model.parameters()] + weights(model)


def saved(comm: un.Communicator, checkpoint: Path) -> None:
    model = model_of()
    with torch.no_grad():
        next(model.parameters()).fill_(0.25)
    un.checkpoint.save(checkpoint, {"model": model}, comm)


def test_checkpoint_is_loaded_again(tmp_path: Path) -> None:
    ranks = pool("shm", 2, timeout=200.0)
    ranks.run(apart, saved, tmp_path / "saved")
    results = ranks.run(apart, loaded, tmp_path, tmp_path / "saved")
    assert equal(un.replay(tmp_path, 1, loaded, (tmp_path, tmp_path / "saved")), results[1])


def late(comm: un.Communicator, folder: Path) -> tuple[bool, str]:
    """A wait with a timeout fails, and the message arrives later."""
    un.record(folder, comm)
    x = torch.zeros(1)
    if comm.rank == 1:
        comm.barrier()
        comm.send(torch.ones(1), 0)
        return True, ""
    work = comm.irecv(x, 1)
    early = work.is_completed()
    text = ""
    try:
        work.wait(0.01)
    except CommTimeoutError as error:
        text = error.message.partition("waited")[0]
    comm.barrier()
    work.wait()
    return early, f"{text}{x.item()}"


def test_wait_that_timed_out_does_so_again(tmp_path: Path) -> None:
    results = pool("shm", 2, timeout=200.0).run(apart, late, tmp_path)
    assert results[0] == (False, "1.0")
    assert un.replay(tmp_path, 0, late, (tmp_path,)) == results[0]


def rebuilt(comm: un.Communicator, folder: Path) -> tuple[int, float]:
    with un.record(folder, comm):
        if comm.rank == 1:
            raise KeyError("this rank is gone")
        try:
            comm.barrier()
        except un.CommError:
            comm = comm.rebuild()
        total = torch.ones(1)
        comm.all_reduce(total)
        return comm.size, total.item()


def test_rebuilt_communicator_is_recorded_too(tmp_path: Path) -> None:
    ends = un.launch(rebuilt, 3, "shm", args=(tmp_path,), on_failure="continue")
    assert ends[2] == (2, 2.0)
    assert un.replay(tmp_path, 2, rebuilt, (tmp_path,)) == (2, 2.0)


def checked(comm: un.Communicator, folder: Path) -> tuple[float, float]:
    with un.record(folder, comm):
        part = comm.split(0)
        total, received = torch.ones(1), torch.zeros(1)
        part.all_reduce(total)
        part.sendrecv(total, (comm.rank + 1) % comm.size, received, (comm.rank - 1) % comm.size)
        return total.item(), received.item()


@pytest.mark.parametrize("check", ["full", "off"])
def test_recording_with_other_checks(check: Any, tmp_path: Path) -> None:
    assert un.launch(checked, 2, "thread", args=(tmp_path,), check=check, timeout=60) == [(2.0, 2.0)] * 2
    assert un.replay(tmp_path, 1, checked, (tmp_path,)) == (2.0, 2.0)


def test_misuse_is_told(tmp_path: Path) -> None:
    def parts_first(comm: un.Communicator) -> None:
        comm.dup()
        un.record(tmp_path / "parts", comm)

    def forgotten(comm: un.Communicator) -> None:
        pass

    def early(comm: un.Communicator) -> None:
        comm.barrier()

    def twice(comm: un.Communicator) -> None:
        un.record(tmp_path, comm).close()
        un.record(tmp_path, comm)

    def mailbox(comm: un.Communicator) -> None:
        un.record(tmp_path / "box", comm)
        comm.mailbox()

    def no_steps(comm: un.Communicator) -> None:
        un.record(tmp_path / "steps", comm, steps=0)

    def swapped(comm: un.Communicator) -> None:
        wrong: Any = un.record
        wrong(comm, tmp_path)

    with pytest.raises(TypeError, match="a folder and a Communicator, not a"):
        un.launch(swapped, 1, "thread")
    with pytest.raises(ValueError, match="call record right after init"):
        un.launch(parts_first, 1, "thread")
    with pytest.raises(FileExistsError, match=r"rank0\.record"):
        un.launch(twice, 1, "thread")
    with pytest.raises(UnavailableError, match="are not recorded"):
        un.launch(mailbox, 2, "thread")
    with pytest.raises(ValueError, match="steps must be at least 1"):
        un.launch(no_steps, 1, "thread")
    with pytest.raises(ValueError, match=r"has not called un\.record"):
        un.replay(tmp_path, 0, forgotten)
    with pytest.raises(CommError, match=r"a call before un\.record was not recorded"):
        un.replay(tmp_path, 0, early)
    with pytest.raises(FileNotFoundError, match=r"recordings of ranks \[0\], and none of rank 5"):
        un.replay(tmp_path, 5, forgotten)


@pytest.mark.parametrize("content", [b"", b"something else", b"unisono record 1\n" + bytes(40), None])
def test_damaged_file_is_refused(content: bytes | None, tmp_path: Path) -> None:
    run_apart(other_calls, tmp_path, "none")
    path = tmp_path / "rank0.record"
    path.write_bytes(path.read_bytes()[:40] if content is None else content)
    with pytest.raises(ValueError, match="record"):
        un.replay(tmp_path, 0, other_calls, (tmp_path, "none"))


def test_flipped_bit_in_a_file_is_refused(tmp_path: Path) -> None:
    run_apart(other_calls, tmp_path, "none")
    path = tmp_path / "rank0.record"
    whole = path.read_bytes()
    # Sums of zeros are recorded; a one among them would be a wrong number. The lengths of the last entry are left out:
    # one that is too long reads as an entry that was being written when its process ended.
    for place in range(whole.index(b"result"), whole.rindex(b"recv"), 97):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises((ValueError, MismatchError)):
            un.replay(tmp_path, 0, other_calls, (tmp_path, "none"))


SCRIPT = """
import sys
import torch
import unisono as un

comm = un.init()
with un.record(sys.argv[1], comm):
    total = torch.full((3,), float(sys.argv[2]) * (comm.rank + 1))
    comm.all_reduce(total)
    print("total", total[0].item())
comm.close()
"""


def multiplied(comm: un.Communicator, folder: Path) -> None:
    """What the script does with the factor 1."""
    with un.record(folder, comm):
        total = torch.full((3,), 1.0 * (comm.rank + 1))
        comm.all_reduce(total)


def record_here(folder: Path, script: Path) -> None:
    un.launch(multiplied, 2, "thread", args=(folder,))


def record_job(folder: Path, script: Path) -> None:
    job = [sys.executable, "-m", "unisono", "run", "-n", "2", str(script), str(folder), "1"]
    subprocess.run(job, check=True, capture_output=True, timeout=300)


@pytest.mark.parametrize("record", [record_here, pytest.param(record_job, marks=pytest.mark.soak)])
def test_command_replays_a_script(
    record: Callable[[Path, Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "recorded"
    script.write_text(SCRIPT)
    record(folder, script)
    # The command puts the script in the place of the program, and its surroundings in those of this process.
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    replay = ["replay", str(folder), "--rank", "1"]
    assert main([*replay, str(script), str(folder), "1"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.splitlines() == [
        "total 3.0",
        "rank 1: 1 collectives and 0 messages as recorded; the script has ended",
    ]
    assert main([*replay, "--json", str(script), str(folder), "2"]) == 1
    said = capsys.readouterr()
    assert "all_reduce #1 of world" in json.loads(said.out)["difference"]
    assert "script.py" in said.err
