"""Tensors on accelerators, on hosts without one: the tests of `make gpu` on a fake device."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import run

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to compile the fake device")


# Its compilation takes half a minute of processor time, once in each clone.
@pytest.mark.timeout(600)
def test_streams_are_followed_on_the_fake_device(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # In this process, which has imported torch already.
    monkeypatch.setattr(sys, "path", [*sys.path])
    status = run.main(["-k", "test_gpu_streams and shm"])
    printed = capfd.readouterr().out
    assert status == 0, printed
    assert "fake device" in printed


@pytest.mark.soak
@pytest.mark.timeout(500)
def test_gpu_tests_pass_on_the_fake_device() -> None:
    ended = subprocess.run([sys.executable, run.__file__], capture_output=True, text=True, timeout=480, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "fake device" in ended.stdout
