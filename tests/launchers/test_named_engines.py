"""`launch(..., on="ray")` and its like: what they ask of each engine; with the engines themselves in the soak."""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_helpers import ON, die, new_pool, on_dask, train
from launcher_helpers import is_running
from waiting import wait_until

import unisono as un
from unisono.engines import ENGINES, Dask, Ray, Submitit
from unisono.engines.dask import DaskWorkers
from unisono.errors import CommError, CommTimeoutError, PeerLostError, UnavailableError
from unisono.host.mpi_library import find_mpirun, mpirun_environment
from unisono.launcher.engines import resolve

KILLED_IS_KNOWN_WITHIN_S = 30.0
"""On a busy machine; 1 to 3 s on an idle one."""
ENDED_WITHIN_S = 60.0


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers that engines start find what these tests import."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))


class Lender:
    """An engine of another package."""

    lent = 0

    @contextmanager
    def workers(self, size: int, timeout_s: float) -> Iterator[Executor]:
        assert timeout_s == 33
        with new_pool(size) as pool:
            Lender.lent += 1
            yield pool
            Lender.lent -= 1


def test_engine_of_another_package_is_used_by_name() -> None:
    ENGINES.register("lender", Lender)
    try:
        assert un.launch(lambda comm: comm.size, 2, on="lender", timeout=33) == [2, 2]
        assert un.launch(lambda comm: comm.size, 2, on=Lender(), timeout=33) == [2, 2]
    finally:
        ENGINES.unregister("lender")
    assert Lender.lent == 0


def square_here(x: int) -> tuple[int, int]:
    return x * x, os.getpid()


def end_worker_once(marker: Path, x: int) -> int:
    """Kill the worker at the first call of all."""
    if x == 3:
        try:
            marker.touch(exist_ok=False)
        except FileExistsError:
            return x
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def test_pool_on_an_executor() -> None:
    before = set(threading.enumerate())
    with new_pool(2) as workers:
        with un.Pool(2, on=workers) as pool:
            found = list(pool.map(square_here, range(20), chunksize=1))
        assert [square for square, _ in found] == [x * x for x in range(20)]
        assert {process for _, process in found} <= {child.pid for child in multiprocessing.active_children()}
        # The workers are free again.
        assert un.launch(lambda comm: comm.size, 2, on=workers) == [2, 2]
        assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("unisono")]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"on": "rya"}, "unknown engine 'rya'"),
        ({"on": "ray", "backend": "thread"}, "'thread' are threads of this process: leave out on="),
    ],
)
def test_pool_refuses_what_cannot_be(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        un.Pool(2, **given)


def test_pool_of_a_communicator_takes_no_engine() -> None:
    with un.init() as comm, pytest.raises(ValueError, match="pass on= with a number of workers"):
        un.Pool(comm, on="ray")


def test_local_is_the_processes_of_this_host() -> None:
    assert resolve("local") is None
    assert un.launch(lambda comm: comm.backend, 2, "thread", on="local") == ["thread"] * 2


@pytest.mark.parametrize(
    ("name", "package", "module"),
    [("ray", "ray", "ray"), ("dask", "distributed", "distributed"), ("submitit", "submitit", "submitit")],
)
def test_engine_that_is_not_installed_says_how_to_install_it(
    name: str, package: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        UnavailableError, match=rf"engine '{name}' needs the package '{package}', .*: pip install .*{name}"
    ):
        un.launch(lambda comm: comm.rank, 2, on=name)


def test_resources_of_a_rank_are_a_bundle() -> None:
    assert Ray().bundle == {"CPU": 1}
    assert Ray(num_cpus=0, num_gpus=0.5, resources={"disk": 2}).bundle == {"GPU": 0.5, "disk": 2}
    with pytest.raises(ValueError, match="some resource to be reserved: pass num_cpus"):
        Ray(num_cpus=0)


class Workers:
    """Stand-in for a client of Dask, with as much of it as waiting for workers needs."""

    cluster: Any = None

    def __init__(self, **resources: dict[str, float]) -> None:
        self.resources = resources
        self.tasks = {"a": ["busy", "busy"], "b": ["busy"], "c": []}
        self.bound: list[Any] = []
        self.released: list[bool] = []

    def scheduler_info(self, n_workers: int) -> dict[str, Any]:
        return {"workers": {address: {"resources": stock} for address, stock in self.resources.items()}}

    def processing(self) -> dict[str, list[str]]:
        return self.tasks

    def nthreads(self) -> dict[str, int]:
        return dict.fromkeys(self.resources, 1)

    def get_executor(self, **options: Any) -> Any:
        self.bound.append((options["workers"], options["retries"], options["resources"]))

        def shutdown(wait: bool) -> None:
            self.released.append(wait)

        return SimpleNamespace(submit=lambda fn, *args: fn(*args), shutdown=shutdown)


def test_dask_lends_the_least_busy_workers_that_have_the_resources() -> None:
    pytest.importorskip("distributed", reason="asks Dask for its client")
    client = Workers(a={"GPU": 1}, b={"GPU": 1}, c={})
    with Dask(client, resources={"GPU": 1}).workers(2, 1) as executor:
        assert [executor.submit(lambda: 7), executor.submit(lambda: 8)] == [7, 8]
    assert client.released == [False, False]
    assert client.bound == [(["b"], 0, {"GPU": 1}), (["a"], 0, {"GPU": 1})]
    with (
        pytest.raises(CommTimeoutError, match=r"2 of 3 workers with {'GPU': 1} for 3 ranks after 0.2 s; start"),
        Dask(client, resources={"GPU": 1}).workers(3, 0.2),
    ):
        pass


def test_dask_keeps_as_many_workers_of_an_adaptive_cluster_as_there_are_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", SimpleNamespace())
    client = Workers()
    adaptive = SimpleNamespace(minimum=0, maximum=4)
    client.cluster = SimpleNamespace(_adaptive=adaptive)

    def scale(n_workers: int) -> dict[str, Any]:
        return {"workers": {str(number): {} for number in range(adaptive.minimum)}}

    client.scheduler_info = scale  # type: ignore[method-assign]
    with Dask(client).workers(3, 1):
        assert adaptive.minimum == 3
    with pytest.raises(CommTimeoutError, match="Dask has 4 workers for 5 ranks"), Dask(client).workers(5, 0.2):
        pass
    assert adaptive.minimum == 0


def test_dask_without_a_scheduler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", SimpleNamespace())
    client = Workers()
    # As a client answers that has lost its scheduler.
    client.scheduler_info = lambda n_workers: {}  # type: ignore[method-assign]
    with pytest.raises(CommError, match="Dask's scheduler does not answer"), Dask(client).workers(1, 1):
        pass


def test_dask_tells_of_a_worker_that_has_left() -> None:
    client = Workers(a={}, b={})
    executor = DaskWorkers(client, ["a", "b"], {}, lambda taken: "")
    futures = [executor.submit(Future) for _ in range(2)]
    assert [executor.why_lost(future) for future in futures] == [None, None]
    del client.resources["b"]
    assert [executor.why_lost(future) for future in futures] == [None, "its worker b was retired, restarted or killed"]


def test_ray_that_the_program_has_shut_down_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    running = [True]
    removed: list[Any] = []
    group = SimpleNamespace(wait=lambda timeout_s: True)
    util = SimpleNamespace(placement_group=lambda bundles, strategy: group, remove_placement_group=removed.append)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: running[0], util=util))
    monkeypatch.setitem(sys.modules, "ray.util", util)
    with Ray().workers(2, 1):
        pass
    assert removed == [group]
    with Ray().workers(2, 1):
        running[0] = False
    assert removed == [group]


def test_ranks_of_submitit_are_divided_between_nodes() -> None:
    with pytest.raises(ValueError, match="leave out tasks_per_node"):
        Submitit(tasks_per_node=2)
    with pytest.raises(ValueError, match="'debug' runs one task"), Submitit(cluster="debug").workers(2, 1):
        pass
    pytest.importorskip("submitit", reason="asks submitit for an executor")
    with (
        pytest.raises(ValueError, match="3 ranks cannot be divided equally between nodes=2"),
        Submitit(nodes=2).workers(3, 1),
    ):
        pass


# -- with the engines -------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ON)
def test_training_and_a_death(name: str, tmp_path: Path) -> None:
    with ON[name](4, tmp_path) as on:
        for ranks in (2, 4):
            found = un.launch(train, ranks, args=(3,), on=on, deterministic=True)
            assert found == un.launch(train, ranks, args=(3,), deterministic=True)
        note = tmp_path / "killed"
        results = un.launch(die, 4, on=on, on_failure="continue", args=(note,))
        assert time.time() - float(note.read_text()) < KILLED_IS_KNOWN_WITHIN_S
        assert isinstance(results[1], PeerLostError)
        assert "rank 1 of 4 was lost" in str(results[1])
        assert max(results[0], results[2], results[3]) < KILLED_IS_KNOWN_WITHIN_S
        assert un.launch(lambda comm: comm.rank, 2, on=on) == [0, 1]


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ON)
def test_pool_outlives_a_worker(name: str, tmp_path: Path) -> None:
    with ON[name](3, tmp_path) as on, un.Pool(3, on=on) as pool:
        tasks = functools.partial(end_worker_once, tmp_path / "ended")
        assert list(pool.map(tasks, range(30), chunksize=1)) == list(range(30))
        assert (tmp_path / "ended").exists()


def meet_until(comm: un.Communicator, end: Path) -> int:
    """Note that a rank has begun, and end with the others once this file exists."""
    end.with_name(f"begun-{comm.rank}").touch()
    while not any(comm.all_gather_object(end.exists())):
        time.sleep(0.01)
    return comm.rank


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("ends", "event", "words"),
    [
        (True, "retired", "rank 0 of 2 has ended, but DaskWorkers lost its result: its worker .* was retired"),
        (False, "retired", "rank 0 of 2 was lost"),
        (False, "restarted", r"rank \d of 2 was lost: DaskWorkers cancelled its task, which had started"),
    ],
)
def test_dask_that_loses_a_rank_under_way(ends: bool, event: str, words: str, tmp_path: Path) -> None:
    """Dask ends a worker's process half a minute after its retirement, and so a rank that does not end before."""
    end = tmp_path / "end"
    with on_dask(2, tmp_path) as on:
        client = importlib.import_module("distributed").get_client()
        assert un.launch(lambda comm: comm.rank, 2, on=on) == [0, 1]

        def act() -> None:
            assert wait_until(lambda: len([*tmp_path.glob("begun-*")]) == 2, ENDED_WITHIN_S)
            # `launch` gives ranks to workers in this order, as all are idle.
            client.restart() if event == "restarted" else client.retire_workers([*client.nthreads()][:1])
            if ends:
                end.touch()

        actor = threading.Thread(target=act)
        actor.start()
        with pytest.raises(PeerLostError, match=words):
            un.launch(meet_until, 2, on=on, args=(end,))
        actor.join()


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_pool_ends_whose_dask_workers_were_retired(tmp_path: Path) -> None:
    with on_dask(2, tmp_path) as on, un.Pool(2, on=on) as pool:
        assert len([*pool.map(square_here, range(9))]) == 9
        client = importlib.import_module("distributed").get_client()
        client.retire_workers([*client.nthreads()])


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_adaptive_cluster_of_dask_is_scaled() -> None:
    distributed = pytest.importorskip("distributed", reason="runs ranks on Dask")
    with distributed.LocalCluster(n_workers=0, threads_per_worker=1, dashboard_address=None) as cluster:
        cluster.adapt(minimum=0, maximum=2)
        with distributed.Client(cluster):
            assert un.launch(lambda comm: comm.rank, 2, on="dask") == [0, 1]


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ray", r"not reserved 1 CPU for each of 3 ranks .* 2 CPU \(. free\), room for 2 of 3 ranks"),
        ("dask", r"Dask has 2 workers for 3 ranks after 5 s"),
    ],
)
def test_gang_that_cannot_be_had_is_refused_whole(name: str, words: str, tmp_path: Path) -> None:
    with ON[name](2, tmp_path) as on, pytest.raises(CommTimeoutError, match=words):
        un.launch(lambda comm: comm.rank, 3, on=on, timeout=5)


CALLER = """
import os, pathlib, sys, time
import torch
import unisono as un
from engine_helpers import ON

def work(comm, folder, calls):
    pathlib.Path(folder, f"{comm.rank}.pid").write_text(str(os.getpid()))
    while True:
        if calls:
            comm.all_reduce(torch.ones(1000))

if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[2])
    with ON[sys.argv[1]](2, folder) as on:
        un.launch(work, 2, on=on, args=(str(folder), sys.argv[3] == "calls"))
"""


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "work"), [*((name, "calls") for name in ON), ("ray", "spins"), ("submitit", "spins")])
def test_no_rank_outlives_a_caller_that_is_killed(name: str, work: str, start: Any, tmp_path: Path) -> None:
    pytest.importorskip({"dask": "distributed"}.get(name, name), reason="runs ranks on it")
    (tmp_path / "caller.py").write_text(CALLER)
    caller = start([sys.executable, tmp_path / "caller.py", name, tmp_path, work])
    files = [tmp_path / f"{rank}.pid" for rank in range(2)]
    # An engine and its workers start meanwhile, which may take longer than an end.
    assert wait_until(lambda: all(file.exists() and file.read_text() for file in files), 3 * ENDED_WITHIN_S)
    ranks = [int(file.read_text()) for file in files]
    os.kill(caller.pid, signal.SIGKILL)
    assert wait_until(lambda: not any(map(is_running, ranks)), ENDED_WITHIN_S)


RECIPES = Path(__file__).parents[2] / "docs/recipes"


def programs(recipe: str) -> list[str]:
    return re.findall(r"^```py\n(.*?)^```$", (RECIPES / recipe).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("recipe", "number", "package"),
    [
        ("ray.md", 0, "ray"),
        ("ray.md", 1, "ray.train.torch"),
        ("dask.md", 0, "distributed"),
        ("submitit.md", 0, "submitit"),
    ],
)
def test_recipe_runs_as_it_stands(recipe: str, number: int, package: str, start: Any, tmp_path: Path) -> None:
    pytest.importorskip(package, reason="the page is about it", exc_type=ImportError)
    (tmp_path / "script.py").write_text(programs(recipe)[number])
    program = start([sys.executable, "script.py"], dict(os.environ), cwd=tmp_path)
    _, err = program.communicate(timeout=200)
    assert program.returncode == 0, err


@pytest.mark.soak
@pytest.mark.skipif(find_mpirun() is None, reason="needs mpirun")
def test_recipe_of_mpi_runs_as_it_stands(start: Any, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(programs("mpi-futures.md")[0])
    command = [find_mpirun(), "-n", "3", sys.executable, "-m", "mpi4py.futures", tmp_path / "script.py"]
    program = start(command, mpirun_environment(os.environ, crowded=True))
    _, err = program.communicate(timeout=300)
    assert program.returncode == 0, err


MPI_PROGRAM = """
import unisono as un

def program(comm):
    return comm.rank, comm.size, comm.backend

if __name__ == "__main__":
    print(un.launch(program, 2, on="mpi"))
    try:
        un.launch(program, 3, on="mpi")
    except un.CommError as error:
        print(error)
"""


@pytest.mark.soak
@pytest.mark.skipif(find_mpirun() is None, reason="needs mpirun")
def test_futures_of_mpi_by_name(start: Any, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(MPI_PROGRAM)
    command = [find_mpirun(), "-n", "3", sys.executable, "-m", "mpi4py.futures", tmp_path / "program.py"]
    out, err = start(command, mpirun_environment(os.environ, crowded=True)).communicate(timeout=300)
    assert "[(0, 2, 'shm'), (1, 2, 'shm')]" in out, err
    assert "this MPI job has 2 workers for 3 ranks; start it by mpirun -n 4 python -m mpi4py.futures" in out
