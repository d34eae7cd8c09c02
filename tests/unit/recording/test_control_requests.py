"""Each request to the control plane is recorded, or forwarded on purpose; a replay answers it, or asks a local one."""

from __future__ import annotations

import copy
from unittest import mock

from unisono.core.control import ControlPlane
from unisono.recording.recorder import ControlReplies
from unisono.recording.replayer import AloneControl

# The rest of a program's run does not depend on the replies to these requests.
FORWARDED = {
    "boundaries",
    "close",
    "hold",
    "join",
    "leave",
    "request_admission",
    "request_stop",
    "set",
    "share",
    "watch",
}
LOCAL = {"add", "check", "close", "compare_set", "delete", "first_cause", "leave", "num_keys", "set", "share"}


def test_recording_forwards_no_request_by_accident() -> None:
    inner = mock.create_autospec(ControlPlane, instance=True)
    replies = ControlReplies(inner, lambda name, *_: f"reply to {name}")
    requests = {*ControlPlane.__abstractmethods__, "measured"}
    recorded = requests - FORWARDED
    assert {name for name in requests if getattr(replies, name) is getattr(inner, name)} == FORWARDED
    assert [getattr(replies, name)() for name in recorded] == [f"reply to {name}" for name in recorded]


def test_replay_leaves_no_request_to_a_local_control_plane_by_accident() -> None:
    assert ControlPlane.__abstractmethods__ - vars(AloneControl).keys() == LOCAL


def test_control_planes_can_be_copied() -> None:
    replies = ControlReplies(AloneControl(mock.Mock()), lambda name, *_: name)
    assert copy.copy(replies).get("key") == "get"
    assert copy.copy(replies).check is not None
