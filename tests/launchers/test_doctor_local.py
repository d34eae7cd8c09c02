"""Findings of the doctor about this host: memory, name, ports, cores, interfaces, and other hosts."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from doctor_helpers import Seen, find, the_problem
from launcher_helpers import task

from unisono.host.native import NO_EXTENSIONS
from unisono.tools.doctor import Target


# -- memory ----------------------------------------------------------------------------------------
def test_dev_shm_of_64_kib(
    doctor: Callable[..., Seen], namespaces: Callable[[str], tuple[str, ...]], tmp_path: Path
) -> None:
    small = namespaces("mount -t tmpfs -o size=64k shm /dev/shm")
    seen = doctor("memory", before=small)
    text = seen.the_problem("memory")
    assert text.startswith("/dev/shm has 64.0 KiB free of 64.0 KiB")
    assert "DataLoader workers" in text
    # The fix is a command, and it mends.
    mended = namespaces(f"mount -t tmpfs -o size=64k shm /dev/shm\n{seen.problems('memory')[0]['fix']}")
    assert doctor("memory", before=mended).status == 0


def test_dev_shm_not_writable(monkeypatch: pytest.MonkeyPatch) -> None:
    from unisono.tools.doctor.checks import memory

    monkeypatch.setattr(memory, "_FOLDER", Path("/no/such/folder"))
    assert "does not exist or cannot be written" in the_problem("memory").text


# -- the native core ------------------------------------------------------------------------------
def test_native_core_disabled_or_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from unisono.tools.doctor.checks import extension

    monkeypatch.setattr(extension, "native", object)
    assert [found.state for found in find("extension")] == ["ok"]
    monkeypatch.setattr(extension, "native", lambda: None)
    monkeypatch.setenv(NO_EXTENSIONS, "1")
    (found,) = find("extension")
    assert (found.state, found.fix) == ("info", f"unset {NO_EXTENSIONS}")
    monkeypatch.delenv(NO_EXTENSIONS)
    (found,) = find("extension")
    assert found.state == "optional"
    assert "is missing: backends shm and tcp need it" in found.text


# -- torch's build ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("cuda", "vendor", "kind", "state", "says"),
    [
        ("12.8", "0x8086", "0x030000", "info", r"CUDA's libraries \(2.5 GB\) were installed for nothing"),
        ("12.8", "0x10de", "0x020700", "info", "were installed for nothing"),
        ("12.8", "0x10de", "0x030200", "optional", r"NVIDIA GPU \(0000:01:00.0\), but torch cannot use it"),
        (None, "0x10de", "0x030200", "optional", "torch was built without CUDA"),
        (None, "0x8086", "0x030000", None, ""),
    ],
)
def test_torch_built_for_another_host(
    cuda: str | None,
    vendor: str,
    kind: str,
    state: str | None,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    from unisono.tools.doctor.checks import torch as check

    device = tmp_path / "0000:01:00.0"
    device.mkdir()
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")
    packages = [
        SimpleNamespace(name="nvidia-cublas", files=[SimpleNamespace(size=2_500_000_000), SimpleNamespace(size=None)]),
        SimpleNamespace(name="torch", files=[SimpleNamespace(size=700_000_000)]),
        SimpleNamespace(name=None, files=None),
    ]
    monkeypatch.setattr(check, "_PCI_DEVICES", tmp_path)
    monkeypatch.setattr(check, "distributions", lambda: packages)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = find("torch")
    assert [each.state for each in found] == ["ok", *([state] if state else [])]
    assert re.search(says, found[-1].text)
    # GPUs may be hidden on purpose.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [each.state for each in find("torch")] == ["ok"]


# -- the host's name -------------------------------------------------------------------------------
def test_host_name_resolves_to_loopback(
    doctor: Callable[..., Seen], namespaces: Callable[[str], tuple[str, ...]], tmp_path: Path
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n127.0.1.1 planted\n")
    lines = f"hostname planted\nmount --bind {hosts} /etc/hosts"
    # Ranks of this host only are not affected.
    alone = doctor("host_name", before=namespaces(lines))
    assert (alone.status, alone.findings[0]["state"]) == (0, "optional")
    assert alone.findings[0]["fix"]
    seen = doctor("host_name", "--hosts", "10.1.1.20,10.1.1.21", before=namespaces(lines))
    text = seen.the_problem("host_name")
    assert "the host name planted resolves to the loopback, 127.0.1.1" in text
    assert "torchrun gives that address to the ranks of other hosts" in text
    fix = seen.problems("host_name")[0]["fix"]
    if "ADDRESS" not in fix:
        assert doctor("host_name", before=namespaces(f"{lines}\n{fix}")).status == 0
        assert "localhost" in hosts.read_text()


def test_host_name_does_not_resolve(
    doctor: Callable[..., Seen], namespaces: Callable[[str], tuple[str, ...]], tmp_path: Path
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n203.0.113.9 elsewhere\n")
    # There is no DNS server either.
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    lines = f"mount --bind {hosts} /etc/hosts\nmount --bind {tmp_path}/resolv.conf /etc/resolv.conf\nhostname "
    text = doctor("host_name", before=namespaces(f"{lines} nobody.invalid")).the_problem("host_name")
    assert "the host name nobody.invalid has no address" in text
    text = doctor("host_name", before=namespaces(f"{lines} elsewhere")).the_problem("host_name")
    assert "resolves to 203.0.113.9, which is not an address of this host" in text


# -- ports -----------------------------------------------------------------------------------------
@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


@pytest.mark.parametrize("text", ["20000", "9-3", "1-70000", "a-b", "-5", "0-9"])
def test_range_that_is_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("UNISONO_PORT_RANGE", text)
    assert the_problem("ports").text.startswith(f"UNISONO_PORT_RANGE is {text!r}, which is no range of ports")


def test_range_of_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("UNISONO_PORT_RANGE", f"{port}-{port}")
        assert (
            the_problem("ports").text == f"no port of UNISONO_PORT_RANGE {port}-{port} is free, so no rank can listen"
        )
    assert "1 of the 1 ports" in find("ports")[-1].text


@pytest.mark.parametrize("master", [{}, {"MASTER_ADDR": "127.0.0.1"}, {"MASTER_ADDR": "localhost"}])
def test_occupied_port(monkeypatch: pytest.MonkeyPatch, taken: int, master: dict[str, str]) -> None:
    for name, value in {**master, "MASTER_PORT": str(taken)}.items():
        monkeypatch.setenv(name, value)
    found = the_problem("ports")
    assert f"MASTER_PORT {taken} is taken by process {os.getpid()} (" in found.text
    match = re.search(r"export MASTER_PORT=(\d+)", found.fix or "")
    assert match
    monkeypatch.setenv("MASTER_PORT", match[1])
    assert [one.state for one in find("ports")] == ["ok"]


def test_ports_of_slurm_and_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in task(0, 2).items():
        monkeypatch.setenv(name, value)
    (found,) = find("ports")
    assert f"port {15000 + 200505 % 16384}, the rendezvous of Slurm's step 200505.0," in found.text
    with socket.create_server(("0.0.0.0", 15000 + 200505 % 16384)):
        assert "is taken by process" in the_problem("ports").text
    for name in task(0, 2):
        monkeypatch.delenv(name)
    (found,) = find("ports")
    assert "port 29500, torchrun's default" in found.text


@pytest.mark.parametrize("port", ["0", "70000", "x", "-1"])
def test_no_port(monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    monkeypatch.setenv("MASTER_PORT", port)
    assert f"MASTER_PORT {port} is not a port" in the_problem("ports").text


def test_port_of_another_host(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("MASTER_ADDR", "203.0.113.9")
    (found,) = find("ports")
    assert (found.state, "another host" in found.text) == ("info", True)


# -- cores -----------------------------------------------------------------------------------------
def test_more_ranks_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "64000")
    found = the_problem("cores")
    assert "64000 ranks on this host by the environment, more ranks than cores" in found.text
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert [one.state for one in find("cores")] == ["ok"]
    assert "70000 ranks" in the_problem("cores", Target(ranks=70000)).text


def test_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5000")
    found = the_problem("cores", Target(ranks=1))
    assert "1 ranks with OMP_NUM_THREADS=5000 are more threads than cores" in found.text
    assert re.fullmatch(r"export OMP_NUM_THREADS=\d+", found.fix or "")


def test_cgroup_cpu_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    from unisono.host import processors

    monkeypatch.setattr(processors, "quota", lambda: 1.5)
    monkeypatch.setattr(processors, "visible", lambda: 64)
    monkeypatch.setattr("unisono.tools.doctor.checks.cores.visible", lambda: 64)
    assert "1 core(s) are what the control group allows of 64" in the_problem("cores", Target(ranks=2)).text


# -- hosts -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        (("127.0.0.1", "nobody.invalid"), "nobody.invalid has no address here"),
        (("203.0.113.8", "203.0.113.9"), "none of 203.0.113.8, 203.0.113.9 is an address of this host"),
        (("127.0.0.1", "127.0.0.2"), "127.0.0.1 and 127.0.0.2 are all addresses of this host"),
        (("127.0.0.1", "203.0.113.9"), "127.0.0.1 is the loopback, 127.0.0.1, here"),
    ],
)
def test_invalid_hosts(hosts: tuple[str, ...], words: str) -> None:
    assert words in the_problem("between_hosts", Target(hosts=hosts)).text


@pytest.mark.soak
def test_missing_host_is_named(port: int) -> None:
    found = the_problem("between_hosts", Target(hosts=("127.0.0.1", "127.0.0.2"), rank=1, port=port, limit_s=15.0))
    assert f"no answer from 127.0.0.1:{port}" in found.text
    assert "on 127.0.0.1 at the same time" in (found.fix or "")


# -- interfaces ------------------------------------------------------------------------------------
@pytest.mark.parametrize("variable", ["UNISONO_INTERFACE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_missing_interface(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "planted0")
    found = the_problem("interface")
    assert f"{variable}" in found.text
    assert "planted0" in found.text
    assert found.fix == f"unset {variable}"


def test_requested_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_INTERFACE", "lo")
    assert [one.text for one in find("interface")] == ["127.0.0.1 of lo, which UNISONO_INTERFACE names"]


def test_host_with_only_loopback(doctor: Callable[..., Seen]) -> None:
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, timeout=300, check=False)
    if tried.returncode:
        pytest.skip(f"this kernel or user may not make namespaces: {tried.stderr.strip()}")
    seen = doctor("interface", before=("unshare", "--net"))
    assert (seen.status, seen.findings[0]["state"]) == (0, "info")
    assert "the loopback is the only network" in seen.findings[0]["text"]
