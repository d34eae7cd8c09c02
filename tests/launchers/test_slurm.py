"""Slurm's node lists, and ranks that find each other by what Slurm tells its tasks."""

from __future__ import annotations

import itertools
import logging
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from launcher_helpers import BATCH, expect, task

from unisono.bootstrap import find, slurm
from unisono.bootstrap.slurm import MAX_HOSTS, SlurmStep, expand, port_of, step
from unisono.control import sockets
from unisono.control.local import LocalControl

Start = Callable[..., "subprocess.Popen[str]"]


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


# -- node lists ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("vm", "vm"),
        ("node[001-004,7],gpu-a", "node001 node002 node003 node004 node7 gpu-a"),
        ("gnode[10,20,25,37]", "gnode10 gnode20 gnode25 gnode37"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[099-101]", "n099 n100 n101"),
        ("n[9-010]", "n9 n10"),
        ("a[1-2]b[3-4]", "a1b3 a1b4 a2b3 a2b4"),
        ("rack[0-1]-node[1,3]-ib", "rack0-node1-ib rack0-node3-ib rack1-node1-ib rack1-node3-ib"),
        ("[a,b]x", "ax bx"),
        (" tux[1-2] ", "tux1 tux2"),
        ("a,a", "a a"),
    ],
)
def test_host_lists(text: str, names: str) -> None:
    assert expand(text) == names.split()


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "a,", ",a", "a,,b", "n[", "n]", "n[]", "n[1-", "n[1-2", "n[3-1]", "n[1,]", "n[1-2]]", "a b"),
        *(
            "[" * 5000,
            "a" * 5000 + "[",
            "a[1]" * 5000 + "[",
            "n[1,[2-3]]",
            "n[0-65536]",
            "n[0-999]m[0-999]",
            "n[1-99999999999999999]",
            "n[1-40000],n[1-40000]",
        ),
    ],
)
def test_invalid_host_lists(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a list of hosts|at most 65536"):
        expand(text)


LETTERS = st.text("abcxyz.-_", min_size=1, max_size=4)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[str, list[str]]:
    first, count = draw(st.integers(0, 1200)), draw(st.integers(1, 12))
    width = draw(st.integers(1, 6))
    low = str(first).zfill(width)
    return f"{low}-{first + count - 1}", [str(first + i).zfill(len(low)) for i in range(count)]


@st.composite
def items(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A text and what it stands for, made the other way round: from the names to the text."""
    text, names = "", [""]
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            # A letter on either side of a number, so that no text looks like a range.
            more = draw(LETTERS)
            ends = [more]
        else:
            single = st.integers(0, 99).map(lambda number: (str(number), [str(number)]))
            choices = draw(st.lists(st.one_of(ranges(), single), min_size=1, max_size=3))
            more = f"[{','.join(part for part, _ in choices)}]"
            ends = [end for _, part in choices for end in part]
        text, names = text + more, [name + end for name in names for end in ends]
        if len(names) > 500:
            break
    return text, names


@given(st.lists(items(), min_size=1, max_size=3))
def test_arbitrary_host_lists(parts: list[tuple[str, list[str]]]) -> None:
    # As many hosts as one list may stand for.
    assume(all(len(names) <= 65_536 for _, names in parts))
    assert expand(",".join(text for text, _ in parts)) == [name for _, names in parts for name in names]


@given(st.text("n[]-,01 9", max_size=24))
def test_arbitrary_text_parses_or_fails(text: str) -> None:
    try:
        names = expand(text)
    except ValueError:
        return
    assert 0 < len(names) <= MAX_HOSTS
    assert not any(mark in name for name in names for mark in "[], ")


# -- steps -----------------------------------------------------------------------------------------
def test_slurm_task(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = ("gnode10", "gnode11")
    set_all(monkeypatch, task(3, 4, SLURM_STEP_NODELIST="gnode[10-11]", SLURM_LOCALID="1", SLURM_STEP_ID="2"))
    assert step() == SlurmStep(3, 4, 1, 200505, 2, nodes)


def test_step_variables_override_job_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, task(1, 2))
    assert step() == SlurmStep(1, 2, 1, 200505, 0, ("gnode10",))


@pytest.mark.parametrize(
    ("variables", "tasks"),
    [
        (BATCH, 4),
        # A shell of salloc.
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_NODELIST": "n[1-2]"}, 2),
        ({"SLURM_JOB_ID": "7"}, None),
        # A shell of salloc that Slurm itself runs as a step.
        (task(0, 1, SLURM_STEP_ID="4294967290"), 4),
    ],
)
def test_process_outside_a_step_is_single(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variables: dict[str, str], tasks: int | None
) -> None:
    set_all(monkeypatch, variables)
    assert step() is None
    with caplog.at_level(logging.WARNING, "unisono"):
        place = find()
    assert (place.rank, place.size) == (0, 1)
    assert isinstance(place.control, LocalControl)
    assert "a world of one; start the ranks with srun" in place.source
    assert [f"the job has {tasks} tasks" in text for text in caplog.messages] == [True] * (tasks is not None)
    place.close()


def test_step_of_one_task_is_single(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, task(0, 1))
    place = find()
    assert (place.size, place.source) == (1, "step 200505.0 of Slurm has one task: a world of one")
    place.close()


def test_minimal_variables_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, {"SLURM_JOB_ID": "5", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"})
    assert step() == SlurmStep(1, 2, 1, 5, 0, ())


def test_job_name_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bash", "interactive"):
        set_all(monkeypatch, task(1, 2, SLURM_JOB_NAME=name))
        found = step()
        assert found is not None
        assert (found.rank, found.size) == (1, 2)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID is 'x', which is not a number"),
        ({"SLURM_PROCID": "2"}, "rank 2 is not among 0 to 1"),
        ({"SLURM_STEP_NODELIST": "n["}, "is not a list of hosts"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is 70000"),
        ({"SLURM_LOCALID": "one"}, "SLURM_LOCALID is 'one'"),
    ],
)
def test_invalid_values(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: str) -> None:
    set_all(monkeypatch, task(1, 2) | variables)
    with pytest.raises(ValueError, match=words):
        find(timeout_s=1.0)


def test_steps_have_different_ports() -> None:
    near = [port_of(job, number) for job, number in itertools.product(range(1000, 1500), range(8))]
    assert len(set(near)) == len(near)
    assert {port_of(job, number) for job in range(0, 10**6, 997) for number in range(3)} <= set(range(15000, 31384))


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return the rendezvous address of `find`, without connecting."""
    seen = SimpleNamespace()

    def watched(seat: object, host: str, port: int, secret: object) -> None:
        seen.seat, seen.host, seen.port = seat, host, port

    monkeypatch.setattr(slurm, "find_at", watched)
    return seen


def test_rendezvous_of_several_nodes(monkeypatch: pytest.MonkeyPatch, meeting: SimpleNamespace) -> None:
    set_all(monkeypatch, task(2, 4, SLURM_STEP_NODELIST="gnode[10-11]", SLURM_STEP_ID="1"))
    find()
    assert (meeting.host, meeting.port) == ("gnode10", port_of(200505, 1))
    assert meeting.seat.source == f"rank 2 of 4 from Slurm's step 200505.1, rendezvous at gnode10:{port_of(200505, 1)}"
    set_all(monkeypatch, {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4711"})
    find()
    assert (meeting.host, meeting.port) == ("10.0.0.7", 4711)


def test_rank_0_does_not_listen_on_loopback_alone(monkeypatch: pytest.MonkeyPatch, meeting: SimpleNamespace) -> None:
    # By the name it listens at all addresses: that of the loopback, too, where its node's other ranks look for it.
    monkeypatch.setattr(sockets, "means_here", {"gnode10": True}.__getitem__)
    monkeypatch.setattr(sockets.socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, 1, 6, "", ("127.0.1.1", 0))])
    for rank in range(2):
        set_all(monkeypatch, task(rank, 2, SLURM_STEP_NODELIST="gnode[10-11]"))
        find()
        assert meeting.host == "gnode10"
    with sockets.listen(meeting.host, 0) as listener:
        assert listener.getsockname()[0] in ("::", "0.0.0.0")


def test_torchrun_overrides_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, task(0, 2) | {"RANK": "0"})
    with pytest.raises(ValueError, match="RANK is known but WORLD_SIZE is not"):
        find()


# -- for real --------------------------------------------------------------------------------------
MEET = """
import sys
from unisono.bootstrap import find
from unisono.core.group import Group
place = find(timeout_s=100.0)
said = place.control.exchange(Group.world(place.rank, place.size, place.name), "x", (place.rank, place.local_rank), 100)
print(said, place.name, place.source)
place.close()
"""


def test_two_steps_of_a_job_are_separate(start: Start) -> None:
    steps = [(number, rank) for number in (0, 1) for rank in (0, 1)]
    tasks = [start([sys.executable, "-c", MEET], task(rank, 2, SLURM_STEP_ID=str(step))) for step, rank in steps]
    for (number, rank), (out, err) in zip(steps, [one.communicate(timeout=300) for one in tasks], strict=True):
        assert not err
        assert out.startswith(f"[(0, 0), (1, 1)] slurm200505.{number}-world1 rank {rank} of 2")


@pytest.mark.soak
def test_two_steps_at_one_port_are_separate(start: Start, port: int) -> None:
    same = {"MASTER_PORT": str(port)}
    first = start([sys.executable, "-c", MEET], task(0, 2, **same))
    with socket.socket() as probe:
        expect(lambda: probe.connect_ex(("127.0.0.1", port)) == 0, "rank 0 listens")
    other = start([sys.executable, "-c", MEET.replace("100.0", "1.0")], task(1, 2, SLURM_STEP_ID="1", **same))
    _, err = other.communicate(timeout=300)
    # Less than the whole second is left when the ranks meet.
    assert re.search(r"waited [01]\.\d s in init for rank 0", err), err
    assert "step 200505.1 has 2 tasks on 1 node(s), of which gnode10 is the first" in err
    last = start([sys.executable, "-c", MEET], task(1, 2, **same))
    assert [one.communicate(timeout=300)[0][:16] for one in (first, last)] == ["[(0, 0), (1, 1)]"] * 2
