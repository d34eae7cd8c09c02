"""Hosts of ranks, by proof, and the addresses by which they are reached."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from waiting import run_concurrently

import unisono as un
from unisono.bootstrap import Rendezvous
from unisono.control import LocalHub
from unisono.core.group import Group
from unisono.host import network
from unisono.launcher import api
from unisono.launcher.api import choose_backend
from unisono.transports import TRANSPORTS
from unisono.transports.shm import segment

NOBODY: dict[str, str] = {}


@pytest.mark.parametrize(
    ("named", "environment", "expected"),
    [
        (None, NOBODY, None),
        ("ib0", {"UNISONO_INTERFACE": "lo"}, ("ib0", "interface=")),
        (None, {"UNISONO_INTERFACE": "ib0", "GLOO_SOCKET_IFNAME": "lo"}, ("ib0", "UNISONO_INTERFACE")),
        (None, {"GLOO_SOCKET_IFNAME": "ib0,lo", "NCCL_SOCKET_IFNAME": "lo"}, ("lo", "GLOO_SOCKET_IFNAME")),
        (None, {"UNISONO_INTERFACE": " "}, None),
        (None, {"NCCL_SOCKET_IFNAME": "=lo"}, ("lo", "NCCL_SOCKET_IFNAME")),
        (None, {"NCCL_SOCKET_IFNAME": "=l"}, None),
        (None, {"NCCL_SOCKET_IFNAME": "ib,l"}, ("lo", "NCCL_SOCKET_IFNAME")),
    ],
)
def test_interface_setting_precedence(
    named: str | None, environment: dict[str, str], expected: tuple[str, str] | None
) -> None:
    assert network.requested_interface(named, environment) == expected


def test_interface_and_address_map_to_each_other() -> None:
    assert network.address_of("lo") == "127.0.0.1"
    assert network.interface_of("127.0.0.1") == "lo"
    assert network.interface_of("192.0.2.77") is None
    with pytest.raises(ValueError, match=r"no network interface 'ib7'; it has .*lo"):
        network.address_of("ib7")


@pytest.mark.parametrize("variable", ["UNISONO_INTERFACE", "GLOO_SOCKET_IFNAME"])
def test_missing_interface_is_named_by_its_variable(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "ib7")
    with pytest.raises(ValueError, match=f"'ib7', which {variable} names; it has .*lo"):
        un.init()


def test_advertised_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UNISONO_INTERFACE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        network,
        "address_towards",
        lambda host, port=9: {"me": "127.0.1.1", "far": "10.1.2.3"}.get(host, "127.0.0.1"),
    )
    monkeypatch.setattr(network, "means_here", lambda host: host != "far")
    # An explicit loopback address is intended; a host name that resolves to it is a common default.
    assert network.address_for_others("127.0.0.1") == "127.0.0.1"
    assert network.address_for_others("localhost") == "127.0.0.1"
    # Other hosts know where that name leads, and this one listens at all of its addresses.
    assert network.address_for_others("me") == "me"
    assert network.address_for_others("far") == "10.1.2.3"
    monkeypatch.setenv("UNISONO_INTERFACE", "lo")
    assert network.address_for_others("me") == "127.0.0.1"


def neighbours(size: int) -> list[Any]:
    """Return the result of each rank, each a thread of this process."""
    hub, found = LocalHub(), [None] * size

    def run(rank: int) -> None:
        control, group = hub.control(), Group.world(rank, size)
        control.join(group, lambda cause: None)
        found[rank] = TRANSPORTS["shm"].shm_peers(group, control, 10.0)
        control.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def test_ranks_sharing_memory_are_neighbours() -> None:
    assert neighbours(3) == [((0, 1, 2),)] * 3


def test_rank_with_a_wrong_token_has_no_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container under the same kernel: everything but the proof says that the host is the same."""
    found_by, shown = segment.open_file, threading.Lock()
    seen: list[bytes] = []

    def other(card: bytes) -> Any:
        with shown:
            seen.append(card)
            wrong = len(seen) == 2
        return found_by(card[:-16] + bytes(16) if wrong else card)

    monkeypatch.setattr(segment, "open_file", other)
    found = neighbours(3)
    assert found == [found[0]] * 3
    assert sorted(map(len, found[0])) == [1, 2]


def test_without_shared_memory_there_are_no_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "why_no_shm", lambda: "an obstacle")
    assert neighbours(3) == [((0,), (1,), (2,))] * 3


def test_best_backend() -> None:
    assert choose_backend(((0,),), gpus=False) == "thread"
    assert choose_backend(((0, 1), (2, 3)), gpus=False) == "shm+tcp"
    assert choose_backend(((0,), (1,), (2,)), gpus=False) == "tcp"
    assert choose_backend(((0,), (1,)), gpus=False, network="mpi") == "mpi"
    assert choose_backend(((0, 1), (2,)), gpus=False, network="mpi") == "shm+mpi"


@pytest.mark.parametrize(("gpus", "expected"), [(2, ["cuda:0", "cuda:1"]), (1, ["cuda:0", "cuda:0"])])
def test_ranks_of_one_host_use_one_gpu_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, expected: list[str]
) -> None:
    seen: dict[int, str] = {}

    class Refusing:
        in_process = False

        @classmethod
        def connect(cls, group: Group, control: Any, options: Any) -> Any:
            seen[group.rank] = options.device
            raise un.errors.UnavailableError("there is no GPU")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(api, "transport_named", lambda name: Refusing)

    def start(rank: int) -> None:
        with pytest.raises(un.errors.UnavailableError, match="there is no GPU"):
            un.init("nccl", init_method=f"file://{tmp_path}/meeting", rank=rank, world_size=2, timeout=20)

    run_concurrently(lambda: start(0), lambda: start(1))
    assert [seen[0], seen[1]] == expected


@pytest.mark.parametrize(
    ("seen", "selected", "own"),
    [
        ([["a"], ["b"], ["c"]], "0", True),
        ([["a", "b"], ["a", "b"], ["c"]], "0,1", True),
        ([["a"], ["b"], ["a"]], "0", False),
        ([["a"], [], ["b"]], "0", False),
        # Nothing says that each rank sees a GPU of its own, so that CUDA is not asked.
        ([["a"], ["b"], ["c"]], "", False),
        ([["a", "b", "c"]] * 3, "", True),
    ],
)
def test_ranks_have_a_gpu_each_whatever_its_number(
    seen: list[list[str]], selected: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = threading.local()
    hub = LocalHub()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", selected)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(here.gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=here.gpus[number]))

    def discovered(rank: int) -> bool:
        here.gpus = seen[rank]
        control = hub.control()
        control.join(Group.world(rank, 3))
        place = Rendezvous(rank, 3, None, control, "127.0.0.1", "world", "a test")
        return api.discover(place, None, 20.0).gpus

    assert run_concurrently(*(partial(discovered, rank) for rank in range(3))) == [own] * 3
