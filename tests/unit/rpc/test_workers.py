"""Errors that escape from a task."""

from __future__ import annotations

import logging

import pytest

from unisono.rpc.workers import run_task


def failing(error: BaseException) -> None:
    raise error


def test_ctrl_c_during_a_task_reaches_the_caller() -> None:
    with pytest.raises(KeyboardInterrupt):
        run_task(lambda: failing(KeyboardInterrupt()))


@pytest.mark.parametrize("error", [KeyError("key"), SystemExit(1)])
def test_other_errors_of_a_task_are_logged(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        run_task(lambda: failing(error))
    assert "handling a message failed" in caplog.text
