"""The heartbeat that programs, and `unisono run` for them, may set."""

from __future__ import annotations

import math
from datetime import timedelta

import pytest

import unisono as un
from unisono.launcher.api import heartbeat_seconds
from unisono.launcher.script_job import ScriptJob


@pytest.mark.parametrize(
    ("heartbeat", "variable", "said"),
    [
        (1.0, None, "heartbeat must be at least 2 s, not 1"),
        (0, None, "heartbeat must be a positive number of seconds"),
        (math.nan, None, "heartbeat is nan"),
        (None, "1.5", "UNISONO_HEARTBEAT must be at least 2 s, not 1.5"),
        (None, "soon", "UNISONO_HEARTBEAT is 'soon'"),
        (None, "-3", "UNISONO_HEARTBEAT is '-3'"),
    ],
)
def test_a_heartbeat_that_cannot_be_is_refused(
    monkeypatch: pytest.MonkeyPatch, heartbeat: float | None, variable: str | None, said: str
) -> None:
    if variable is not None:
        monkeypatch.setenv("UNISONO_HEARTBEAT", variable)
    with pytest.raises(ValueError, match=said):
        un.init(heartbeat=heartbeat)
    with pytest.raises(ValueError, match=said):
        un.launch(print, 1, "thread", heartbeat=heartbeat)


def test_a_heartbeat_of_the_call_precedes_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert heartbeat_seconds(None) is None
    variables = ScriptJob(["train.py"], 1, heartbeat_s=30.0).environment(0, (1, 2), 0)
    monkeypatch.setenv("UNISONO_HEARTBEAT", variables["UNISONO_HEARTBEAT"])
    assert heartbeat_seconds(None) == 30.0
    assert heartbeat_seconds(timedelta(minutes=1)) == 60.0
