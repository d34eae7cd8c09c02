"""Ranks that do not find each other learn in one sentence why."""

from __future__ import annotations

import socket
import uuid
from typing import Any

import pytest
from bootstrap_helpers import SOON, meet
from waiting import run_concurrently

from unisono.bootstrap import find, rendezvous
from unisono.core.group import Group
from unisono.errors import CommError, CommTimeoutError, MismatchError

pytestmark = pytest.mark.usefixtures("nobody_started_us")


@pytest.mark.parametrize(
    ("arguments", "env", "words"),
    [
        ((), {"WORLD_SIZE": "2"}, "WORLD_SIZE is known but RANK is not"),
        ((), {"RANK": "0"}, "RANK is known but WORLD_SIZE is not"),
        ((None, 1), {}, "RANK is known but WORLD_SIZE is not"),
        (("env://",), {}, "neither RANK nor WORLD_SIZE is set"),
        ((), {"RANK": "one", "WORLD_SIZE": "2"}, "RANK is 'one', which is not a number"),
        ((), {"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 is not among 0 to 1"),
        ((), {"RANK": "-1", "WORLD_SIZE": "2"}, "rank -1 is not among"),
        ((), {"RANK": "0", "WORLD_SIZE": "0"}, "at least 1, not 0"),
        ((), {"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set; set MASTER_ADDR to the host of rank 0"),
        ((), {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x"}, "MASTER_PORT is not set"),
        ((), {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "a"}, "MASTER_PORT is 'a'"),
        ((), {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "0"}, "from 1 to 65535"),
        (("tcp://127.0.0.1:1",), {}, "pass rank and world_size too"),
        (("tcp://127.0.0.1:1", 0), {}, "pass rank and world_size too"),
        (("tcp://127.0.0.1", 0, 2), {}, "pass tcp://host:port"),
        (("tcp://127.0.0.1:99999", 0, 2), {}, "pass tcp://host:port"),
        (("tcp://:80", 0, 2), {}, "pass tcp://host:port"),
        (("tcp://0.0.0.0:80", 0, 2), {}, "is not an address that other hosts can reach"),
        (("tcp://127.0.0.1:1", 2, 2), {}, "rank 2 is not among"),
        (("tcp://127.0.0.1:1", "0", 2), {}, "rank must be a whole number, not '0'"),
        (("tcp://127.0.0.1:1", True, 2), {}, "rank must be a whole number"),
        (
            ("udp://127.0.0.1:1", 0, 2),
            {},
            "unknown init_method 'udp://127.0.0.1:1'; known: env://, file://, mpi://, tcp://",
        ),
        (("127.0.0.1:1", 0, 2), {}, "unknown init_method"),
        (("file://relative/path", 0, 2), {}, "with three slashes"),
        (("file:///no/such/directory/file", 0, 2), {}, "the directory /no/such/directory does not exist"),
    ],
)
def test_invalid_values(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[Any, ...], env: dict[str, str], words: str
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        find(*arguments, timeout_s=1.0)


def test_unreachable_master(port: int) -> None:
    with pytest.raises(
        CommTimeoutError, match=f"rank 1 of 2, init: timed out: no answer from 127.0.0.1:{port} after 0.3 s"
    ):
        find(f"tcp://127.0.0.1:{port}", 1, 2, 0.3)


@pytest.mark.parametrize(
    "env",
    [
        {"RANK": "1", "WORLD_SIZE": "2"},
        {"SLURM_PROCID": "1", "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"},
    ],
)
def test_errors_name_the_source_of_the_rank(monkeypatch: pytest.MonkeyPatch, port: int, env: dict[str, str]) -> None:
    for name, value in {**env, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CommTimeoutError, match=r"^rank 1 of 2, init: timed out: no answer from"):
        find(timeout_s=0.3)


def test_occupied_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(CommError, match=f"cannot listen at 127.0.0.1:{port}: .* taken by another program"):
            find(f"tcp://127.0.0.1:{port}", 0, 2, 0.3)


def test_missing_ranks_are_named(port: int) -> None:
    with pytest.raises(CommTimeoutError, match=r"waited 0.\d s in init for rank 1 \(and 2\), which have not arrived"):
        find(f"tcp://127.0.0.1:{port}", 0, 3, 0.3)


def test_rank_with_another_secret_is_reported_to_the_others(port: int) -> None:
    url = f"tcp://127.0.0.1:{port}"
    outcomes = run_concurrently(
        lambda: find(url, 0, 3, 1.0, "one"), lambda: find(url, 1, 3, SOON, "two"), lambda: find(url, 2, 3, SOON, "one")
    )
    assert "use different secrets. Set UNISONO_SECRET" in str(outcomes[1])
    for told in (outcomes[0], outcomes[2]):
        assert isinstance(told, CommTimeoutError)
        assert "for rank 1, which has not arrived" in str(told)
        assert "a process at 127.0.0.1 that claims to be rank 1 was refused because its secret differs" in str(told)


def test_unauthenticated_rank_claim_is_ignored(port: int) -> None:
    url = f"tcp://127.0.0.1:{port}"

    def mended() -> Any:
        with pytest.raises(CommError, match="use different secrets"):
            find(url, 1, 2, SOON, "two")
        return find(url, 1, 2, SOON, "one")

    places = run_concurrently(lambda: find(url, 0, 2, SOON, "one"), mended)
    assert [place.rank for place in places] == [0, 1]
    late = run_concurrently(lambda: places[0].control.exchange(Group.world(0, 2, places[0].name), "x", 1, 0.1))[0]
    assert isinstance(late, CommTimeoutError)
    assert "secret" not in str(late)
    for place in places:
        place.close()


@pytest.fixture
def as_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each call pass for a process of its own."""
    monkeypatch.setattr(rendezvous, "_process", lambda number: uuid.uuid4().hex)


@pytest.mark.usefixtures("as_processes")
def test_two_processes_with_one_rank(port: int) -> None:
    outcomes = run_concurrently(
        *[lambda rank=rank: find(f"tcp://127.0.0.1:{port}", rank, 3, SOON) for rank in (0, 1, 1)]
    )
    assert [type(outcome) for outcome in outcomes] == [MismatchError] * 3
    assert all("two processes claim to be rank 1" in str(outcome) for outcome in outcomes)


@pytest.mark.usefixtures("as_processes")
def test_late_duplicate_rank_is_rejected_alone(port: int) -> None:
    url = f"tcp://127.0.0.1:{port}"
    places = meet(url, 2)
    late = run_concurrently(lambda: find(url, 1, 2, SOON))[0]
    assert isinstance(late, MismatchError)
    values = run_concurrently(
        *[lambda p=p: p.control.exchange_unless_equal(Group.world(p.rank, 2, p.name), "x", 1, SOON) for p in places]
    )
    assert values == [None, None]
    for place in places:
        place.close()


def test_different_sizes(port: int) -> None:
    url = f"tcp://127.0.0.1:{port}"
    outcomes = run_concurrently(lambda: find(url, 0, 2, SOON), lambda: find(url, 1, 3, SOON))
    assert [type(outcome) for outcome in outcomes] == [MismatchError] * 2
    assert all("start all of them with the same number" in str(outcome) for outcome in outcomes)
