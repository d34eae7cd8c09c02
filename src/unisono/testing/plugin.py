"""Pytest plugin: `@pytest.mark.ranks(4)` runs a test on four ranks, each with its `comm`.

    @pytest.mark.ranks(4, backend="thread")
    def test_sum(comm):
        t = torch.ones(3)
        comm.all_reduce(t)
        assert t.tolist() == [4.0] * 3

A failing assertion on any rank fails the test, and a note names the rank. Hypothesis draws each example once for all
ranks, in pytest's process. Every pytest run imports this file, so it must not import slow modules.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Generator
from typing import Any
from unittest import TestCase

import pytest

from unisono.testing.marked_ranks import MarkedRanks, torch_ranks
from unisono.testing.rank_rules import run_case

__all__ = [
    "comm",
    "pytest_addoption",
    "pytest_configure",
    "pytest_generate_tests",
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
    """Add the options that run each marked test on several numbers of ranks and several backends."""
    group = parser.getgroup("unisono")
    group.addoption("--ranks", type=_numbers, help="numbers of ranks for each test marked with `ranks`, such as 2,3")
    group.addoption("--backends", help="backends for each test marked with `ranks`, such as thread,shm")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", _MARKER)


def pytest_unconfigure() -> None:
    """Stop the ranks that tests have used."""
    if pools := sys.modules.get("unisono.testing.pools"):
        pools.close_pools()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise a marked test with the options `--ranks` and `--backends`."""
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is None:
        return
    if marker.kwargs.get("torch") and "comm" not in metafunc.fixturenames:
        # A test of torch code need not take `comm` as an argument.
        metafunc.fixturenames.append("comm")
    if "comm" not in metafunc.fixturenames:
        return
    # Import torch now: if the first test's time limit interrupted the import, torch would be broken for all later
    # tests.
    importlib.import_module("unisono.testing.pools")
    made = MarkedRanks(*marker.args, **marker.kwargs)
    sizes = [made.size] if isinstance(made.size, str) else metafunc.config.getoption("ranks") or [made.size]
    backends = (metafunc.config.getoption("backends") or made.backend).split(",")
    variants = [MarkedRanks(size, backend, torch=made.torch, **made.options) for backend in backends for size in sizes]
    # Hypothesis rejects function-scoped fixtures, because all examples would share them.
    drawn = hasattr(metafunc.function, "hypothesis")
    metafunc.parametrize("comm", variants, ids=repr, scope="class" if drawn else "function")


@pytest.fixture
def comm() -> None:
    """The communicator of the rank that runs a test marked with `ranks`."""
    pytest.fail("a test that takes `comm` must declare its number of ranks: @pytest.mark.ranks(4)", pytrace=False)


@pytest.fixture(name="torch_ranks")
def torch_ranks_fixture() -> Callable[..., MarkedRanks]:
    """Return `unisono.testing.torch_ranks`, for tests that run several programs or choose their ranks themselves."""
    return torch_ranks


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> None:
    """Remove the library's frames from the tracebacks of a failure and its causes, unless `UNISONO_TRACEBACK=full`."""
    if call.excinfo is None or os.environ.get("UNISONO_TRACEBACK") == "full":
        return
    if any(str(entry.path).startswith(_LIBRARY) for entry in call.excinfo.traceback):
        from unisono.diagnostics.tracebacks import hide_frames

        hide_frames(call.excinfo.value)
        call.excinfo = pytest.ExceptionInfo.from_exception(call.excinfo.value)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Run a marked test on its ranks, inside the wrappers of pytest and other plugins.

    The test function is replaced temporarily before pytest and other plugins wrap it. Their wrappers therefore handle
    coroutines, return values and expected failures.
    """
    marker = item.get_closest_marker("ranks")
    if marker is None or not isinstance(item, pytest.Function):
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        if item.cls is not None and issubclass(item.cls, TestCase):
            _wrap_case(item, MarkedRanks(*marker.args, **marker.kwargs), patch)
        else:
            _wrap_function(item, patch)
        return (yield)


def _wrap_case(item: pytest.Function, ranks: MarkedRanks, patch: pytest.MonkeyPatch) -> None:
    """Make a test of a `TestCase` run on several ranks. Each rank creates and sets up its own `TestCase`."""
    if not ranks.torch:
        pytest.fail("a test of unittest cannot take `comm`: mark it with `ranks(..., torch=True)`", pytrace=False)
    if hasattr(item.obj, "hypothesis"):
        pytest.fail("each rank would draw its own examples: decorate with `torch_ranks` below `given`", pytrace=False)
    cls = item.cls
    own = vars(cls(item.name))
    # Attributes that class fixtures have set on the instance that pytest created.
    given = {name: value for name, value in vars(item.instance).items() if name not in own}
    debugged = item.config.getoption("usepdb")

    def on_rank(name: str) -> bool:
        return run_case(cls(name), given, debugged=debugged)

    # Functions of the test's module are pickled by value for rank processes, so assign `on_rank` to that module.
    on_rank.__module__ = cls.__module__

    def run(result: object) -> None:
        if any(ranks.run(on_rank, item.name)):
            pytest.fail("Unexpected success", pytrace=False)

    patch.setattr(item.instance, "run", run)


def _wrap_function(item: pytest.Function, patch: pytest.MonkeyPatch) -> None:
    """Make a test run on ranks. Fixtures other than `comm` are created once, and shared by all ranks."""
    callspec = getattr(item, "callspec", None)
    ranks = None if callspec is None else callspec.params.get("comm")
    if not isinstance(ranks, MarkedRanks):
        pytest.fail("a test that is marked with `ranks` must take `comm`, the communicator of its rank", pytrace=False)
    test: Any = item.obj
    if hasattr(test, "hypothesis"):
        patch.setattr(test.hypothesis, "inner_test", ranks(test.hypothesis.inner_test))
        function = getattr(test, "__func__", test)
        chosen = _for_ranks(function._hypothesis_internal_use_settings)
        patch.setattr(function, "_hypothesis_internal_use_settings", chosen)
    elif (cell := _patched(test)) and ranks.on_threads:
        patch.setattr(cell, "cell_contents", ranks(cell.cell_contents))
    elif not inspect.isasyncgenfunction(test):
        patch.setattr(item, "obj", ranks(test))


def _patched(test: Any) -> Any:
    """Return the closure cell of the function under all `unittest.mock` decorators; None if there are no decorators.

    A patch stores only one original value. If several threads entered the patch, the module would remain patched.
    """
    mock = sys.modules.get("unittest.mock")
    cell = None
    while mock and hasattr(test, "__wrapped__") and inspect.getfile(test) == mock.__file__:
        cell = next(cell for cell in test.__closure__ if cell.cell_contents is test.__wrapped__)
        test = cell.cell_contents
    return cell


def _for_ranks(chosen: Any) -> Any:
    """Return Hypothesis settings for a test whose examples run on ranks."""
    from hypothesis import Phase, settings

    # Drop the default deadline of a few hundred milliseconds, because an example may have to start its ranks.
    deadline = None if chosen.deadline == settings().deadline else chosen.deadline
    # Skip Hypothesis's explanations: they would name lines of this library instead of the test, which only the ranks
    # run. One bug may cause different failures on several ranks; it is enough to report one of them.
    phases = [phase for phase in chosen.phases if phase is not Phase.explain]
    return settings(chosen, deadline=deadline, phases=phases, report_multiple_bugs=False)
