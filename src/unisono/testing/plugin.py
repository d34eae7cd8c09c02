"""Pytest plugin: `@pytest.mark.ranks(4)` runs a test on four ranks, each with its `comm`.

    @pytest.mark.ranks(4, backend="thread")
    def test_sum(comm):
        t = torch.ones(3)
        comm.all_reduce(t)
        assert t.tolist() == [4.0] * 3

A failing assertion on any rank fails the test, and a note names the rank. Every run of pytest imports
this file, so it must not import slow modules.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from unisono.communicator import Communicator

__all__ = ["comm", "pytest_configure", "pytest_pyfunc_call", "pytest_runtest_makereport"]

_LIBRARY = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_MARKER = (
    "ranks(size, backend='thread', **options): run the test on ranks; it takes `comm`. Options as for unisono.launch"
)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", _MARKER)


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> None:
    """The communicator of the rank that runs the test, which is marked with `ranks`."""
    if request.node.get_closest_marker("ranks") is None:
        pytest.fail("a test that takes `comm` must declare its number of ranks: @pytest.mark.ranks(4)", pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> None:
    """Hide frames of the library from the traceback of a failure, unless `UNISONO_TRACEBACK=full`."""
    if call.excinfo is not None and os.environ.get("UNISONO_TRACEBACK") != "full":
        for entry in call.excinfo.traceback:
            if str(entry.path).startswith(_LIBRARY):
                entry.frame.f_globals["__tracebackhide__"] = True


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test on its ranks. Other fixtures are created once and shared by all of them."""
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    from unisono.testing.ranks import run_ranks

    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    if "comm" not in arguments:
        pytest.fail("a test that is marked with `ranks` must take `comm`, the communicator of its rank", pytrace=False)
    del arguments["comm"]
    test = pyfuncitem.obj

    # Keep the test's own name: it decides whether ranks can import the test.
    @functools.wraps(test)
    def on_one_rank(comm: Communicator) -> None:
        test(**arguments, comm=comm)

    run_ranks(on_one_rank, *marker.args, **marker.kwargs)
    return True
