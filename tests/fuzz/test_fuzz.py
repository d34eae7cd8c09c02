"""No parser of bytes from a peer or a file crashes, hangs, or takes more memory than stated, whatever it is given.

`make soak` gives each UNISONO_FUZZ_MINUTES (0.1 if not set); `UNISONO_FUZZ_MINUTES=10 make soak` is the long form.
"""

from __future__ import annotations

import os
from random import Random

import pytest
from drive import drive
from fuzzing import SLOWEST_S, Target, hostile, load_targets, smaller, tried
from hypothesis import given, settings
from hypothesis import strategies as st

TARGETS = load_targets()
each = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)


def test_every_parser_is_a_target() -> None:
    names = {target.name for target in TARGETS}
    assert names >= {
        "serialization",
        "frames",
        "mail",
        "handshake",
        "requests",
        "replies",
        "news",
        "launcher_frames",
        "debug_requests",
        "bootstrap_file",
        "hostlist",
        "events",
        "store_address",
    }


@each
def test_valid_input_is_accepted(target: Target) -> None:
    """Else the fuzzer would only ever see the first check."""
    assert len(target.seeds) >= 2
    for seed in target.seeds:
        target.run(seed)
        assert tried(target, seed, measured=True) is None


@each
@settings(max_examples=30)
@given(random=st.randoms(use_true_random=False))
def test_mutated_input(target: Target, random: Random) -> None:
    assert tried(target, hostile(random, target.seeds)) is None


@each
@settings(max_examples=15)
@given(data=st.binary(max_size=300))
def test_arbitrary_input(target: Target, data: bytes) -> None:
    assert tried(target, data, measured=True) is None


@each
@pytest.mark.soak
def test_fuzz_for_minutes(target: Target) -> None:
    minutes = float(os.environ.get("UNISONO_FUZZ_MINUTES", "0.1"))
    count, wrong = drive(target, 60 * minutes)
    print(f"\n{target.name}: {count} inputs in {minutes:g} minutes")
    assert wrong is None, wrong
    assert count > 10


# -- that the fuzzer notices -----------------------------------------------------------------------
def _reader(data: bytes) -> object:
    """Has three mistakes."""
    if len(data) > 3 and data[0] == 7:
        raise IndexError("a crash")
    if data[:1] == b"\xff":
        return bytes(1 << 22)
    raise ValueError("refused")


BAD = Target("bad", _reader, [b"\x06" * 40, b"\x00" * 8], (ValueError,), (1 << 20, 10))


def test_crash_is_found_and_minimized() -> None:
    count, wrong = drive(BAD, 30.0, "fixed")
    assert count > 0
    assert wrong is not None
    found = [hostile(Random(f"x {n}"), BAD.seeds) for n in range(20000)]
    crash = next(data for data in found if "IndexError" in (tried(BAD, data) or ""))
    assert smaller(BAD, crash)[:1] == b"\x07"
    assert len(smaller(BAD, crash)) == 4


def test_memory_limit_is_enforced() -> None:
    assert "took 4" in (tried(BAD, b"\xff", measured=True) or "")
    assert tried(BAD, b"\xff") is None
    assert tried(BAD, b"", measured=True) is None


def test_time_limit_is_enforced(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter((0.0, SLOWEST_S + 1))
    monkeypatch.setattr("fuzzing.time.thread_time", lambda: next(ticks))
    assert "took 3.0 s" in (tried(BAD, b"") or "")


def test_all_mutations_occur() -> None:
    made = {hostile(Random(f"y {n}"), [bytes(range(30))]) for n in range(500)}
    assert len(made) > 400
    assert {len(data) < 30 for data in made} == {True, False}
    assert any(b"\xff" * 8 in data for data in made)
