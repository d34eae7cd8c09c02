"""The marker `ranks`: a test runs on each rank, and fails if it fails on any."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import unisono as un
import unisono.testing.torch_world  # else each run in this process drops it, and torch keeps the first

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


def test_examples_are_drawn_once_and_shrink(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        """
        import pytest
        from hypothesis import given, settings, strategies as st
        from unisono.testing import strategies

        @pytest.mark.ranks(2)
        @given(x=st.integers(0, 100))
        def test_below(comm, x):
            assert comm.all_gather_object(x) == [x, x]
            assert x < 30 or comm.rank == 0

        class TestAbove:
            @settings(max_examples=30)
            @given(x=st.lists(st.integers()))
            @pytest.mark.parametrize("most", [2])
            @pytest.mark.ranks(2, "gloo")
            def test_above(self, comm, most, x):
                assert len(x) <= most

        @pytest.mark.ranks("inputs", chunk_bytes=64)
        @given(inputs=strategies.inputs())
        def test_number_of_ranks_is_drawn(comm, inputs):
            assert comm.size == len(inputs)
            assert comm.size < 3 or len(inputs[comm.rank]) < 2
        """
    )
    result = inner.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=3)
    result.stdout.fnmatch_lines_random(
        [
            "*assert (30 < 30 or 1 == 0)*",
            "*comm=thread-2,*",
            "*x=30,*",
            "*raised on rank 1 of 2*",
            "*x=[[]0, 0, 0[]],*",
            "*inputs=[[]tensor([[]0, 0[]]), tensor([[]0, 0[]]), tensor([[]0, 0[]])[]],*",
        ]
    )
    result.stdout.no_fnmatch_line("*Explanation*")


def test_deadlock_is_reported_soon_on_few_ranks(inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first example waits for the whole timeout, and those that make it smaller not as long."""
    monkeypatch.setattr("unisono.testing.marked_ranks._SHRINKING_S", 0.05)
    inner.makepyfile(
        """
        import pytest
        import torch
        from hypothesis import given
        from unisono.testing import strategies

        @pytest.mark.ranks("inputs", timeout=3)
        @given(inputs=strategies.inputs(max_size=3, max_count=2))
        def test_ring(comm, inputs):
            if comm.size > 1:
                comm.recv(inputs[comm.rank], (comm.rank + 1) % comm.size)
        """
    )
    result = inner.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*DeadlockError: rank ? of 2, *timed out: waited [0-2].? s for *"])


def test_options_multiply_marked_tests(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        """
        import os, pytest
        @pytest.mark.ranks(4)
        @pytest.mark.parametrize("x", [1])
        def test_it(comm, x):
            assert comm.backend in ("thread", "sim") and comm.size in (2, 3)
        @pytest.mark.ranks("size")
        @pytest.mark.parametrize("size", [1])
        def test_own_size(comm, size):
            assert comm.size == size
        def test_unmarked():
            pass
        """
    )
    result = inner.runpytest_inprocess("-v", "--ranks", "2,3", "--backends", "thread,sim")
    result.assert_outcomes(passed=7)
    result.stdout.fnmatch_lines_random(["*test_it[[]*thread-2*", "*test_it[[]*sim-3*", "*test_own_size[[]*sim-size*"])
    result = inner.runpytest_inprocess("--ranks", "two")
    assert "--ranks: invalid" in "".join(result.errlines)


@pytest.mark.parametrize(
    "options", [(), pytest.param(("-n", "2", "-W", "error"), marks=pytest.mark.soak)], ids=["alone", "xdist"]
)
def test_consecutive_tests_reuse_processes_that_end_with_the_session(
    inner: pytest.Pytester, options: tuple[str, ...]
) -> None:
    inner.makepyfile(
        """
        import os, pathlib, pytest
        @pytest.mark.parametrize("fails", [False, True, False, False])
        @pytest.mark.ranks(2, "gloo")
        def test_it(comm, fails):
            pathlib.Path(f"{os.getpid()}-{fails}-{comm.size}").touch()
            assert not fails
        """
    )
    # Each worker of xdist has ranks of its own.
    run = inner.runpytest_subprocess if options else inner.runpytest_inprocess
    run(*options).assert_outcomes(passed=3, failed=1)
    pids = {int(path.name.partition("-")[0]) for path in inner.path.glob("*-2")}
    assert len(pids) == (4 if options else 2)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("backend", ["thread", pytest.param("gloo", marks=pytest.mark.soak)])
def test_hanging_test_ends_and_names_the_rank(
    inner: pytest.Pytester, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A rank that loops does not end by itself.
    monkeypatch.setattr("unisono.launcher.supervisor.GRACE_S", 0.1)
    inner.makepyfile(
        f"""
        import pytest, time
        @pytest.mark.ranks(2, "{backend}")
        def test_start(comm):
            # The limits of the others begin when all that ranks need is imported.
            pass
        @pytest.mark.ranks(2, "{backend}", limit_s=1.0)
        def test_loop(comm):
            while comm.rank == 1:
                time.sleep(0.01)
        @pytest.mark.ranks(2, "{backend}", timeout=0.5)
        def test_barrier(comm):
            while comm.rank == 1:
                time.sleep(0.01)
            comm.barrier()
        @pytest.mark.timeout(1, method="signal")
        @pytest.mark.ranks(2, "{backend}")
        def test_plugin_for_timeouts(comm):
            while comm.rank == 1:
                time.sleep(0.01)
        """
    )
    result = inner.runpytest_inprocess("-p", "no:faulthandler")
    result.assert_outcomes(failed=3, passed=1)
    result.stdout.fnmatch_lines_random(
        [
            "*did not end within 1 s on rank 1. Rank 1 was at:*",
            "*in test_loop*",
            "*barrier #1*waited ?.? s*rank 1, which has not arrived*",
            "*Timeout (>1.0s)*",
            "*in test_plugin_for_timeouts*",
        ]
    )


@pytest.mark.soak
def test_torch_is_imported_before_time_limits_of_tests_begin(inner: pytest.Pytester) -> None:
    inner.makeconftest("import sys\ndef pytest_collection_finish(): print('torch' in sys.modules)")
    inner.makepyfile("import pytest\n@pytest.mark.ranks(2)\ndef test_nothing(comm): pass")
    inner.runpytest_subprocess("--collect-only", "-q").stdout.fnmatch_lines(["True"])


def test_page_about_testing_shows_tests_that_pass(inner: pytest.Pytester) -> None:
    page = (Path(__file__).parents[3] / "docs/how-to/test-on-threads.md").read_text()
    blocks = [block.partition("```")[0] for block in page.split("```python")[1:]]
    code = "".join(block for block in blocks if "@pytest.mark.ranks" in block)
    inner.makepyfile(code)
    inner.runpytest_inprocess("--ranks", "2,5").assert_outcomes(passed=3)
    # The mistake that the page names.
    inner.makepyfile(code.replace("    comm.broadcast(tensor, 0)\n", ""))
    result = inner.runpytest_inprocess("--backends", "sim", "-k", "all_reduce")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*inputs=[[]tensor([[]1[]]), tensor([[]0[]])[]],*"])


def test_marker_with_torch_needs_no_communicator(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        """
        import pytest, torch, torch.distributed as dist
        @pytest.mark.ranks(3, torch=True)
        def test_it():
            tensor = torch.tensor([dist.get_rank()])
            dist.all_reduce(tensor)
            assert tensor.item() == 3
        """
    )
    result = inner.runpytest_inprocess("--ranks", "2,3", "--backends", "thread,sim")
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(["*test_it?thread-2*", "*assert 1 == 3*", "*raised on rank ? of 2*"])


def test_marked_test_of_unittest_runs_on_ranks(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        """
        import pytest, torch.distributed as dist, unittest
        class TestIt(unittest.TestCase):
            def setUp(self):
                self.rank = dist.get_rank()
                self.addCleanup(dist.destroy_process_group)
            @pytest.mark.ranks(2, torch=True)
            def test_passes(self):
                dist.barrier()
                assert dist.get_rank() == self.rank
            @pytest.mark.ranks(2, torch=True)
            def test_is_skipped(self):
                self.skipTest("not here")
            @pytest.mark.ranks(2, torch=True, backend="process")
            def test_fails(self):
                self.assertEqual(dist.get_rank(), 0)
            @pytest.mark.ranks(2)
            def test_takes_none(self):
                pass
        """
    )
    result = inner.runpytest_inprocess()
    result.assert_outcomes(passed=1, failed=2, skipped=1)
    result.stdout.fnmatch_lines_random(["*AssertionError: 1 != 0*", "*raised on rank 1 of 2*", "*cannot take `comm`*"])


# -- the rules of pytest and unittest --------------------------------------------------------------
RULES = """
import asyncio, pytest, unittest
from hypothesis import given, settings, strategies as st

async def test_coroutine():
    assert False

async def test_asynchronous_generator():
    yield

def test_returned():
    return 1

class Awaitable:
    def __await__(self):
        yield

def test_returned_awaitable():
    return Awaitable()

@settings(max_examples=2)
@given(x=st.booleans())
async def test_coroutine_with_examples(x):
    assert False

@settings(max_examples=2)
@given(x=st.booleans())
def test_returned_with_examples(x):
    return 1

def test_xfail():
    pytest.xfail("not yet")

@pytest.mark.xfail(raises=KeyError)
def test_other_failure_than_expected():
    raise ValueError

@pytest.mark.xfail(strict=True)
def test_passes_unexpectedly():
    pass

def test_skips():
    pytest.skip("not here")

def test_skips_in_subtest_and_fails(subtests):
    with subtests.test(i=0):
        pytest.skip("not here")
    assert False

def test_subtest_fails(subtests):
    with subtests.test(i=1):
        assert False

class TestOfUnittest(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def fixture(self):
        self.given = 1

    def tearDown(self):
        type(self).torn_down = True

    @unittest.expectedFailure
    def test_fails_as_expected(self):
        assert False

    @unittest.expectedFailure
    def test_passes_unexpectedly(self):
        pass

    @unittest.skip("not here")
    def test_is_skipped(self):
        assert False

    def test_attribute_of_fixture(self):
        assert self.given == 1

    def test_subtest_fails(self):
        with self.subTest(i=1):
            assert False

    def test_subtest_is_skipped(self):
        with self.subTest(i=1):
            self.skipTest("not here")

    @unittest.expectedFailure
    def test_subtest_fails_as_expected(self):
        with self.subTest(i=1):
            assert False

    def test_test_that_failed_was_torn_down(self):
        assert self.torn_down

class TestThatIsNotSetUp(unittest.TestCase):
    def setUp(self):
        raise ValueError

    @unittest.expectedFailure
    def test_it(self):
        pass

class TestCoroutines(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self):
        self.given = 1

    async def test_passes(self):
        await asyncio.sleep(0)
        assert self.given == 1

    async def test_fails(self):
        assert self.given == 2
"""


def outcomes(inner: pytest.Pytester) -> dict[str, str]:
    """Return the outcome of each test, by its name without the ranks it ran on."""
    found: dict[str, str] = {}
    for report in inner.inline_run("-p", "no:cacheprovider").getreports("pytest_runtest_logreport"):
        name = report.nodeid.partition("[")[0]
        # A subtest that fails has a report of its own, before that of its test.
        if report.failed:
            found[name] = "failed"
        elif (report.when == "call" or report.skipped) and not hasattr(report, "context"):
            found.setdefault(name, "xfailed" if hasattr(report, "wasxfail") else report.outcome)
    return found


@pytest.mark.parametrize("backend", ["thread", pytest.param("process", marks=pytest.mark.soak)])
def test_outcomes_are_those_without_the_marker(inner: pytest.Pytester, backend: str) -> None:
    inner.makepyfile(RULES)
    expected = outcomes(inner)
    assert {"passed", "failed", "skipped", "xfailed"} == set(expected.values())
    inner.makepyfile(f"{RULES}\npytestmark = pytest.mark.ranks(2, '{backend}', torch=True)\n")
    assert outcomes(inner) == expected


def test_coroutine_runs_where_a_plugin_runs_coroutines(inner: pytest.Pytester) -> None:
    """Each rank has a loop, while that of the plugin serves what its fixtures have started."""
    inner.makepyfile(
        coroutines="""
        import asyncio, contextlib, inspect, pytest
        @pytest.hookimpl(tryfirst=True)
        def pytest_pyfunc_call(pyfuncitem):
            if inspect.iscoroutinefunction(pyfuncitem.obj):
                with asyncio.Runner() as runner:
                    server = runner.run(asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0))
                    pyfuncitem.funcargs["port"] = server.sockets[0].getsockname()[1]
                    with contextlib.closing(server):
                        runner.run(pyfuncitem.obj(**pyfuncitem.funcargs))
                return True
        @pytest.fixture
        def port():
            pass
        """,
        test_it="""
        import asyncio, pytest
        @pytest.mark.ranks(2)
        async def test_it(comm, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert await reader.read() == b""
            writer.close()
            assert comm.all_gather_object(comm.rank) == [0, 1]
            assert comm.rank == 0
        """,
    )
    inner.syspathinsert()
    result = inner.runpytest_inprocess("-p", "coroutines")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*assert 1 == 0*", "*raised on rank 1 of 2*"])


def test_patch_by_decorators_ends_with_the_test(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        """
        import os, random, pytest
        from unittest import mock
        class TestIt:
            @pytest.mark.ranks(2)
            @mock.patch("random.choice")
            @mock.patch.dict(os.environ, {"UNISONO_X": "1"})
            @mock.patch("random.shuffle")
            def test_patched(self, shuffle, choice, comm):
                comm.barrier()
                assert random.choice is choice and random.shuffle is shuffle and "UNISONO_X" in os.environ
        def test_after():
            assert "UNISONO_X" not in os.environ
            assert not isinstance(random.choice, mock.Mock) and not isinstance(random.shuffle, mock.Mock)
        """
    )
    inner.runpytest_inprocess().assert_outcomes(passed=2)


def test_debugger_finds_what_a_failed_test_of_unittest_has_made(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        debugger="""
        class Pdb:
            quitting = True
            def reset(self):
                pass
            def interaction(self, frame, error):
                trace = getattr(error, "__traceback__", error)
                while trace.tb_next:
                    trace = trace.tb_next
                print("The resource is", trace.tb_frame.f_locals["self"].resource)
        """,
        test_it="""
        import pytest, unittest
        class TestIt(unittest.TestCase):
            def tearDown(self):
                self.resource = "closed"
            @pytest.mark.ranks(2, torch=True)
            def test_it(self):
                self.resource = "open"
                assert False
        """,
    )
    inner.syspathinsert()
    inner.runpytest_inprocess("--pdb", "--pdbcls=debugger:Pdb").stdout.fnmatch_lines(["*The resource is open*"])
