"""The doctor's report."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator

import pytest
from doctor_helpers import DOCTOR, Start, the_problem

from unisono.tools.cli import main
from unisono.tools.doctor import CHECKS, Target, examination
from unisono.tools.doctor.examination import Finding, info, ok, optional


class Planted:
    """A check with given findings."""

    ORDER = 0

    def __init__(self, look: Callable[[], list[Finding]]) -> None:
        self._look = look

    def check(self, target: Target) -> list[Finding]:
        return self._look()


@pytest.fixture
def plant() -> Iterator[Callable[[Callable[[], list[Finding]]], None]]:
    yield lambda look: CHECKS.register("planted", Planted(look)) and None
    CHECKS.unregister("planted")


def test_failing_check_is_a_cross(plant: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    plant(lambda: [ok(str(int("x")))])
    assert main(["doctor", "planted"]) == 1
    assert "the check itself has failed: ValueError" in capsys.readouterr().out


def test_hanging_check_is_a_cross(plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "_GRACE_S", 0.0)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        plant(lambda: [ok(str(theirs.recv(1)))])
        assert "did not end in time" in the_problem("planted", Target(limit_s=0.1)).text
        ours.send(b"x")


def test_success_and_remarks_exit_with_status_0(plant: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    plant(lambda: [ok("good"), info("by the way", "look"), optional("more", "buy")])
    assert main(["doctor", "planted"]) == 0
    said = capsys.readouterr().out
    assert said.count("good") == said.count("by the way") == 1
    assert "✓ planted        good" in said
    assert "○ planted        optional: more" in said
    assert "  torch " in said
    assert said.endswith("No problems found.\n")
    assert main(["doctor", "planted", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["findings"][1]["fix"]) == (True, "look")
    assert told["machine"]["python"]


def test_secrets_are_not_printed(
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
        (["nonsense"], "unknown check 'nonsense'; known: all_reduce, between_hosts"),
        (["--hosts", "one"], "--hosts needs two or more"),
        (["--hosts", "a,b", "--host", "2"], "--host must be from 0 to 1"),
        (["--host", "0"], "--host is the index of this host in --hosts: pass --hosts too"),
        (["--backend", "glue"], "unknown backend 'glue'; known: auto, gloo, mpi, nccl"),
        (["--backend", "shm+glue"], "unknown backend 'glue'"),
        (["--ranks", "0"], "--ranks must be at least 1"),
        (["--port", "0"], "--port must be from 1"),
        (["--timeout", "0"], "--timeout must be a positive"),
    ],
)
def test_rejected_arguments(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_ascii_terminal(start: Start) -> None:
    done = start([*DOCTOR, "memory"], {"PYTHONIOENCODING": "ascii"})
    out, err = done.communicate(timeout=300)
    assert "ok memory" in out, err
