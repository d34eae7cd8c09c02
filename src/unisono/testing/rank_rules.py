"""The part of pytest's and unittest's rules that holds on one rank of a marked test. Imports nothing slow."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any
from unittest import SkipTest, TestCase, TestResult

__all__ = ["own_fixtures", "run_case"]


class _Subtests:
    """Stands in for `subtests`: ranks that are threads cannot capture output apart, and processes cannot report."""

    @contextmanager
    def test(self, msg: str | None = None, **kwargs: Any) -> Iterator[None]:
        """Context of a subtest. One that fails ends the test: in the next one, other ranks would wait for this rank."""
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
    """Context with what a rank has instead of these fixtures, of `subtests` and `monkeypatch`."""
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        yield {name: _Subtests() if name == "subtests" else patch for name in names}


class _Errors(TestResult):
    """A result with the errors themselves, in their order."""

    def __init__(self) -> None:
        super().__init__()
        # As in `_Subtests`.
        self.failfast = True
        self.raised: list[BaseException] = []

    def _exc_info_to_string(self, info: Any, test: TestCase) -> str:
        """Keep an error that unittest is about to turn into text."""
        self.raised.append(info[1])
        return ""


def run_case(case: TestCase, given: dict[str, Any], *, debugged: bool) -> bool:
    """Run a test of unittest, and return whether it has passed although it was expected to fail.

    Args:
        case: The test, not used before.
        given: Attributes that fixtures have set.
        debugged: Whether a debugger shows what fails.

    Raises:
        BaseException: The first error of the test, so that other ranks learn of it.
        pytest.xfail.Exception: It failed as expected.
        SkipTest: It is skipped.
    """
    vars(case).update(given)
    result = _Errors()
    if debugged:
        # Pytest, too, leaves a test that has failed as it is until the debugger ends.
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
