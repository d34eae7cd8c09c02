"""Every transport of the registry meets every law, and so does every wrapper around one.

`Checked` is around all of them: a communicator puts it on unless it is told not to.
"""

from __future__ import annotations

import re

import pytest
import torch

import unisono as un
from unisono.testing import Faulty, TransportLaws
from unisono.transport import Transport
from unisono.transports import TRANSPORTS
from unisono.wrappers.trace import Traced

RANKS = 4


def why_not(name: str) -> str | None:
    """Why a transport cannot be tried here, in its own words; None if it can."""
    try:
        un.init(name, timeout=10).close()
    except un.errors.UnavailableError as error:
        return str(error)
    if name == "nccl" and torch.cuda.device_count() < RANKS:
        return f"nccl needs a GPU for each rank, and there are fewer than {RANKS}"
    return None


MISSING = {name: reason for name in TRANSPORTS.names() if (reason := why_not(name))}

for _name in sorted(set(TRANSPORTS.names()) - MISSING.keys()):
    _title = f"Test{_name.title()}"
    globals()[_title] = type(_title, (TransportLaws,), {"backend": _name})


@pytest.mark.parametrize("name", MISSING)
def test_a_transport_that_is_not_here_says_how_to_get_it(name: str) -> None:
    assert re.search("use |pip install|needs a GPU", MISSING[name]), MISSING[name]


def test_these_are_always_here() -> None:
    assert not {"thread", "gloo"} & MISSING.keys()
    assert {"TestThread", "TestGloo"} <= globals().keys()


class TestTraced(TransportLaws):
    backend = "thread"

    @staticmethod
    def wrap(inner: Transport) -> Transport:
        return Traced(inner, lambda event: None)


class TestFaultyWithoutFaults(TransportLaws):
    backend = "thread"

    @staticmethod
    def wrap(inner: Transport) -> Transport:
        return Faulty(inner, seed=0)


class TestFaultyWithDelays(TransportLaws):
    backend = "thread"

    @staticmethod
    def wrap(inner: Transport) -> Transport:
        return Faulty(inner, seed=0, delay=0.2, delay_s=0.002)


class TestTwoWrappers(TransportLaws):
    backend = "gloo"

    @staticmethod
    def wrap(inner: Transport) -> Transport:
        return Traced(Faulty(inner, seed=0, delay=0.1, delay_s=0.002), lambda event: None)
