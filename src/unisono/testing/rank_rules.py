"""Behaviour of pytest and unittest on one rank of a marked test. This module imports nothing slow."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any
from unittest import SkipTest, TestCase, TestResult

__all__ = ["own_fixtures", "run_case"]


class _Subtests:
    """Replacement for `subtests`: pytest cannot capture output per thread, nor report subtests of other processes."""

    @contextmanager
    def test(self, msg: str | None = None, **kwargs: Any) -> Iterator[None]:
        """Context of a subtest.

        A failure ends the test, because otherwise other ranks would wait for this rank in the next subtest.
        """
        import pytest

        try:
            yield
        except (pytest.skip.Exception, pytest.xfail.Exception):
            pass
        except BaseException as error:
            error.add_note(f"in subtest [{msg}] {kwargs}")
            raise


@contextmanager
def own_fixtures(names: Set[str]) -> Iterator[dict[str, Any]]:
    """Context with a rank's own versions of these fixtures (`subtests` and `monkeypatch`)."""
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        yield {name: _Subtests() if name == "subtests" else patch for name in names}


class _Errors(TestResult):
    """Test result that stores the exception objects, in order."""

    def __init__(self) -> None:
        super().__init__()
        # As in `_Subtests`, stop at the first failure, because other ranks would wait for this rank.
        self.failfast = True
        self.raised: list[BaseException] = []

    def _exc_info_to_string(self, info: Any, test: TestCase) -> str:
        """Store an error that unittest is about to format as text."""
        self.raised.append(info[1])
        return ""


def run_case(case: TestCase, given: dict[str, Any], *, debugged: bool) -> bool:
    """Run a unittest test, and return whether it passed although it was expected to fail.

    Args:
        case: The test case, which has not run yet.
        given: Attributes set by fixtures.
        debugged: Whether failures open a debugger.

    Raises:
        BaseException: The first error of the test, to be reported to other ranks.
        pytest.xfail.Exception: The test failed as expected.
        SkipTest: The test is skipped.
    """
    vars(case).update(given)
    result = _Errors()
    if debugged:
        # Like pytest, do not tear down a failed test before the debugger exits.
        vars(case)["tearDown"] = lambda: result.raised or type(case).tearDown(case)
    case(result)
    for test, reason in result.skipped:
        if test is case:
            raise SkipTest(reason)
    if result.raised:
        error = result.raised[0]
        if result.expectedFailures:
            import pytest

            raise pytest.xfail.Exception(f"{type(error).__name__}: {error}") from error
        for test, _ in [*result.failures, *result.errors]:
            if test is not case:
                error.add_note(f"in {test}")
        raise error
    return bool(result.unexpectedSuccesses)
