"""Pytest plugin: `@pytest.mark.ranks(4)` runs a test on four ranks, each with its `comm`.

    @pytest.mark.ranks(4, backend="thread")
    def test_sum(comm):
        t = torch.ones(3)
        comm.all_reduce(t)
        assert t.tolist() == [4.0] * 3

A failing assertion on any rank fails the test, and a note names the rank. Hypothesis draws once for all ranks, in the
process of pytest. Every run of pytest imports this file, so it must not import slow modules.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any
from unittest import TestCase

import pytest

from unisono.testing.marked_ranks import MarkedRanks, torch_ranks

__all__ = [
    "comm",
    "pytest_addoption",
    "pytest_configure",
    "pytest_generate_tests",
    "pytest_pyfunc_call",
    "pytest_runtest_call",
    "pytest_runtest_makereport",
    "pytest_unconfigure",
    "torch_ranks_fixture",
]

_LIBRARY = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_MARKER = (
    "ranks(size, backend='thread', *, torch=False, limit_s=60, **options): run the test on ranks; it takes `comm`. "
    "With torch=True each rank has torch's default process group, and the test need not take `comm`. `size` may be "
    "the name of an argument: its value or number of items. Options as for unisono.launch"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that run each marked test on several numbers of ranks, and several backends."""
    group = parser.getgroup("unisono")
    group.addoption("--ranks", type=_numbers, help="numbers of ranks for each test marked with `ranks`, such as 2,3")
    group.addoption("--backends", type=_names, help="backends for each test marked with `ranks`, such as thread,shm")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _names(text: str) -> list[str]:
    return text.split(",")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", _MARKER)


def pytest_unconfigure() -> None:
    """End the ranks that tests have used."""
    if pools := sys.modules.get("unisono.testing.pools"):
        pools.close_pools()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Multiply a marked test by the options `--ranks` and `--backends`."""
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is None:
        return
    if marker.kwargs.get("torch") and "comm" not in metafunc.fixturenames:
        # The test need not take what names its ranks.
        metafunc.fixturenames.append("comm")
    if "comm" not in metafunc.fixturenames:
        return
    # A time limit of the first test that interrupts torch's import would leave torch broken for all others.
    importlib.import_module("unisono.testing.pools")
    made = MarkedRanks(*marker.args, **marker.kwargs)
    sizes = [made.size] if isinstance(made.size, str) else metafunc.config.getoption("ranks") or [made.size]
    backends = metafunc.config.getoption("backends") or [made.backend]
    variants = [MarkedRanks(size, backend, torch=made.torch, **made.options) for backend in backends for size in sizes]
    # Hypothesis refuses arguments of the scope of a function, which examples share.
    drawn = hasattr(metafunc.function, "hypothesis")
    metafunc.parametrize("comm", variants, ids=repr, scope="class" if drawn else "function")


@pytest.fixture
def comm() -> None:
    """The communicator of the rank that runs the test, which is marked with `ranks`."""
    pytest.fail("a test that takes `comm` must declare its number of ranks: @pytest.mark.ranks(4)", pytrace=False)


@pytest.fixture(name="torch_ranks")
def torch_ranks_fixture() -> Callable[..., MarkedRanks]:
    """Return `unisono.testing.torch_ranks`: for tests that run several programs, or choose the ranks themselves."""
    return torch_ranks


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> None:
    """Hide frames and causes inside the library from the report of a failure, unless `UNISONO_TRACEBACK=full`."""
    if call.excinfo is None or os.environ.get("UNISONO_TRACEBACK") == "full":
        return
    if any(str(entry.path).startswith(_LIBRARY) for entry in call.excinfo.traceback):
        from unisono.diagnostics.tracebacks import hide_frames

        hide_frames(call.excinfo.value)
        call.excinfo = pytest.ExceptionInfo.from_exception(call.excinfo.value)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Run a marked test of unittest on its ranks, each of which has its own instance, and sets it up."""
    marker = item.get_closest_marker("ranks")
    cls = item.cls if isinstance(item, pytest.Function) else None
    if marker is None or cls is None or not issubclass(cls, TestCase):
        return
    ranks = MarkedRanks(*marker.args, **marker.kwargs)
    if not ranks.torch:
        pytest.fail("a test of unittest cannot take `comm`: mark it with `ranks(..., torch=True)`", pytrace=False)

    def whole(name: str) -> None:
        cls(name).debug()

    # Processes get it by value, as all of its module.
    whole.__module__ = cls.__module__
    item.__dict__["runtest"] = functools.partial(ranks.run, whole, item.name)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test on its ranks. Other fixtures are created once and shared by all of them."""
    if pyfuncitem.get_closest_marker("ranks") is None:
        return None
    taken = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: value for name, value in pyfuncitem.funcargs.items() if name in taken}
    callspec = getattr(pyfuncitem, "callspec", None)
    ranks = None if callspec is None else callspec.params.get("comm")
    if not isinstance(ranks, MarkedRanks):
        pytest.fail("a test that is marked with `ranks` must take `comm`, the communicator of its rank", pytrace=False)
    test = pyfuncitem.obj
    if hasattr(test, "hypothesis"):
        _run_examples(test, arguments, ranks)
    else:
        _on_ranks(test, ranks)(**arguments)
    return True


def _run_examples(test: Any, arguments: dict[str, Any], ranks: MarkedRanks) -> None:
    """Run a test of Hypothesis, which calls the inner test for each example."""
    from hypothesis import Phase, settings

    inner = test.hypothesis.inner_test
    function = getattr(test, "__func__", test)
    chosen = function._hypothesis_internal_use_settings
    default = settings()
    # The default deadline is some milliseconds, and an example may have to start its ranks.
    deadline = None if chosen.deadline == default.deadline else chosen.deadline
    # An explanation would name lines that ran here, which are those of the library. One mistake fails in several ways
    # on several ranks: one of these is enough.
    phases = [phase for phase in chosen.phases if phase is not Phase.explain]
    function._hypothesis_internal_use_settings = settings(
        chosen, deadline=deadline, phases=phases, report_multiple_bugs=False
    )
    test.hypothesis.inner_test = _on_ranks(inner, ranks)
    try:
        test(**arguments)
    finally:
        test.hypothesis.inner_test = inner


def _on_ranks(test: Callable[..., None], ranks: MarkedRanks) -> Callable[..., None]:
    @functools.wraps(test)
    def on_ranks(*args: Any, comm: MarkedRanks | None = None, **kwargs: Any) -> None:
        ranks.run_test(test, args, kwargs, comm=comm is not None)

    return on_ranks
