"""Reports in shared memory: order, lengths, a full ring, a writer that dies, and bytes that nobody should write."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import threading

import pytest

from unisono.control.report_ring import REPORT_BYTES, ReportReader, ReportWriter
from unisono.core.frames import InvalidFrameError, Kind
from unisono.host.anonymous_files import create_file, open_file


def ends(*, stopped: bool = False) -> tuple[ReportWriter, ReportReader]:
    with create_file("test", REPORT_BYTES) as handle:
        return ReportWriter(handle, lambda: stopped), ReportReader(handle)


def test_reports_of_any_length_arrive_in_order() -> None:
    writer, reader = ends()
    for length in (0, 1, 23, 38, 39, 40, 1000, 100_000):
        writer.write(Kind.CALL if length % 2 else Kind.REQUEST, bytes([length % 251]) * length, 1.0)
    found = [(frame.kind, len(frame.content)) for frame in reader.read()]
    assert found == [
        (Kind.CALL if length % 2 else Kind.REQUEST, length) for length in (0, 1, 23, 38, 39, 40, 1000, 100_000)
    ]
    assert not list(reader.read())


def test_writer_waits_while_the_ring_is_full() -> None:
    writer, reader = ends()
    reports = [bytes([number % 256]) * (number * 97 % 5000) for number in range(2000)]

    def write() -> None:
        for report in reports:
            writer.write(Kind.CALL, report, 60.0)

    thread = threading.Thread(target=write)
    thread.start()
    found: list[bytes] = []
    while len(found) < len(reports):
        found += [frame.content for frame in reader.read()]
    thread.join()
    assert found == reports


def test_report_longer_than_the_ring_arrives() -> None:
    writer, reader = ends()
    report = os.urandom(3 << 20)
    thread = threading.Thread(target=writer.write, args=(Kind.REQUEST, report, 60.0))
    thread.start()
    found: list[bytes] = []
    while not found:
        found += [frame.content for frame in reader.read()]
    thread.join()
    assert found == [report]


@pytest.mark.parametrize("stopped", [False, True])
def test_writer_gives_up_without_a_reader(stopped: bool) -> None:
    writer, _ = ends(stopped=stopped)
    with pytest.raises(TimeoutError, match="the monitor does not read"):
        writer.write(Kind.REQUEST, bytes(2 << 20), 60.0 if stopped else 0.05)


def write_and_die(handle: bytes) -> None:
    writer = ReportWriter(handle, lambda: False)
    for number in range(100):
        writer.write(Kind.CALL, str(number).encode(), 1.0)
    os._exit(9)


def test_reports_outlive_their_writer() -> None:
    with create_file("test", REPORT_BYTES) as handle:
        reader = ReportReader(handle)
        child = multiprocessing.get_context("fork").Process(target=write_and_die, args=(handle,))
        child.start()
        child.join()
    assert child.exitcode == 9
    assert [frame.content for frame in reader.read()] == [str(number).encode() for number in range(100)]


@pytest.mark.parametrize("head", [b"\xff" * 4, bytes(4), (40).to_bytes(4, "little")])
def test_bytes_that_are_no_report_are_refused(head: bytes) -> None:
    with create_file("test", REPORT_BYTES) as handle:
        writer, reader = ReportWriter(handle, lambda: False), ReportReader(handle)
        descriptor, _ = open_file(handle)
    memory = mmap.mmap(descriptor, REPORT_BYTES)
    os.close(descriptor)
    writer.write(Kind.CALL, b"a report", 1.0)
    place = memory.find(b"a report")
    begin = memory.rfind((8).to_bytes(4, "little"), 0, place)
    memory[begin : begin + 4] = head
    writer.write(Kind.CALL, b"another", 1.0)
    with pytest.raises(InvalidFrameError):
        list(reader.read())
