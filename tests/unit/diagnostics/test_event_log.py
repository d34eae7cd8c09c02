"""Event logs: the last events survive their process, in any text, and a damaged file is refused or read."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import unisono as un
from unisono.diagnostics.event_log import EventLog, read_events


def test_last_events_are_kept_in_order(tmp_path: Path) -> None:
    record = EventLog(tmp_path / "a.events", rank=3, kept=4)
    for number in range(10):
        record.put("enter", "world", 3, number or None, f"call {number}")
    pid, rank, events, _ = read_events(tmp_path / "a.events")
    assert (pid, rank) == (os.getpid(), 3)
    assert [(e.number, e.call, e.text) for e in events] == [(n + 1, n, f"call {n}") for n in range(6, 10)]


def test_long_texts_are_truncated_and_control_characters_escaped(tmp_path: Path) -> None:
    record = EventLog(tmp_path / "a.events", rank=0)
    record.put("enter", "g" * 100, 0, None, "\x1b[31m" + "t" * 1000)
    event = read_events(tmp_path / "a.events")[2][0]
    assert event.group == "g" * 48
    assert event.text.startswith("?[31mttt")
    assert event.call is None


def test_any_text_is_kept(tmp_path: Path) -> None:
    record = EventLog(tmp_path / "a.events", rank=0)
    record.put("error", "world", 0, None, "no file '\udcff'")
    assert read_events(tmp_path / "a.events")[2][0].text == "no file '?'"


def test_job_continues_without_an_event_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("UNISONO_EVENTS", str(tmp_path / "file"))
    assert un.launch(lambda comm: comm.rank, 2, "thread") == [0, 1]
    assert "no events are kept in UNISONO_EVENTS=" in caplog.text


def test_full_disk_is_detected_before_mapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        EventLog(tmp_path / "a.events", rank=0)


@given(data=st.binary(max_size=2000))
def test_hostile_file_is_rejected_or_read(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("events") / "x.events"
    EventLog(path, 0, kept=4).put("enter", "world", 0, 1, "text")
    whole = bytearray(path.read_bytes())
    whole[: len(data)] = data
    for content in (data, bytes(whole[: len(path.read_bytes())])):
        path.write_bytes(content)
        try:
            events = read_events(path)[2]
        except ValueError:
            continue
        assert all(event.text.isprintable() for event in events)
