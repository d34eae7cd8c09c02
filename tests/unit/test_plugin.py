"""The marker `ranks`: a test runs on each rank, and fails if it fails on any."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import unisono as un

pytest_plugins = ["pytester"]


@pytest.mark.ranks(3)
def test_marked_test_runs_on_threads(comm: un.Communicator) -> None:
    t = torch.tensor([comm.rank + 1])
    comm.all_reduce(t)
    assert t.item() == 6


@pytest.mark.ranks(2, backend="gloo")
def test_marked_test_runs_on_processes(comm: un.Communicator, tmp_path: Path) -> None:
    (tmp_path / str(comm.rank)).touch()
    comm.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@pytest.mark.ranks(2, timeout=3.0)
@pytest.mark.parametrize("factor", [1, 10])
class TestInAClass:
    def test_parameters_and_other_fixtures_are_passed(self, factor: int, comm: un.Communicator) -> None:
        assert comm.all_gather_object(factor * comm.rank) == [0, factor]


INI = "[pytest]\naddopts = --strict-markers\nfilterwarnings = error\n"


@pytest.fixture
def inner(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeini(INI)
    # Where the package is not installed, its entry point is not there either.
    pytester.makeconftest(
        "import importlib.metadata as m\nif not any(e.value == 'unisono.testing.plugin' "
        "for e in m.entry_points(group='pytest11')):\n    pytest_plugins = ['unisono.testing.plugin']\n"
    )
    return pytester


@pytest.mark.parametrize("backend", ["thread", "gloo"])
def test_failing_rank_fails_the_test_and_is_named(inner: pytest.Pytester, backend: str) -> None:
    inner.makepyfile(
        f"""
        import pytest
        @pytest.mark.ranks(3, "{backend}")
        def test_it(comm):
            value = comm.rank
            assert value != 2
        """
    )
    result = inner.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*assert value != 2*", "*assert 2 != 2*", "*raised on rank 2 of 3*"])
    result.stdout.no_fnmatch_line("*launcher*")


def test_skip_on_ranks_skips_the_test(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        """
        import pytest
        @pytest.mark.ranks(2)
        def test_it(comm):
            pytest.skip("not today")
        """
    )
    inner.runpytest_inprocess().assert_outcomes(skipped=1)


def test_missing_marker_is_explained(inner: pytest.Pytester) -> None:
    inner.makepyfile("def test_it(comm): pass")
    result = inner.runpytest_inprocess()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*@pytest.mark.ranks(4)*"])


def test_missing_comm_argument_is_explained(inner: pytest.Pytester) -> None:
    inner.makepyfile("import pytest\n@pytest.mark.ranks(2)\ndef test_it(): pass")
    result = inner.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*must take `comm`*"])


def test_user_fixture_of_the_same_name_is_kept(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        """
        import pytest
        @pytest.fixture
        def comm():
            return "mine"
        def test_it(comm):
            assert comm == "mine"
        """
    )
    inner.runpytest_inprocess().assert_outcomes(passed=1)
