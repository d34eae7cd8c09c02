"""`algorithm="auto"`: what it depends on, how ranks agree, and what overrides it."""

from __future__ import annotations

import json
import logging
import stat
from pathlib import Path

import pytest
import torch

import unisono as un
from unisono.algorithms import Network, find, serving, simulate
from unisono.collectives.selection import Needs, explain
from unisono.collectives.tuning.cost_table import CostTable, LinkCost, parse_overrides
from unisono.collectives.tuning.fit import Cell, fit
from unisono.collectives.tuning.prediction import Machine, compare, predicted
from unisono.tools.cli import main

TABLE = CostTable(LinkCost(10e-6, 1e-9), LinkCost(10e-6, 1e-9), gamma=0.1e-9)
HOSTS = CostTable(LinkCost(1e-6, 1e-10), LinkCost(10e-6, 1e-9))


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a cache folder of its own, and no overrides."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("UNISONO_ALGORITHM", raising=False)
    monkeypatch.delenv("UNISONO_TUNE_FILE", raising=False)
    return tmp_path / "unisono" / "tune"


def test_choice_is_near_the_best_in_simulation() -> None:
    network = Network(alpha=20e-6, bandwidth=2e9, gamma=0.2e-9)
    pings = [("broadcast", "binomial"), ("reduce", "binomial"), ("all_reduce", "chunked_ring:segments=8")]
    cells = [
        Cell(*ping, 2, n, simulate(*ping, 2, n, network=network).makespan) for ping in pings for n in (8, 4096, 1 << 20)
    ]
    found = fit(cells)
    machine = Machine(CostTable(found.link, found.link, found.gamma, found.overhead), per_host=1024)
    for size in (2, 5, 12):
        names = serving("all_reduce", size)
        for nbytes in (64, 4 << 10, 1 << 20):
            auto = compare("all_reduce", names, size, nbytes, machine).algorithm
            times = {name: simulate("all_reduce", name, size, nbytes, network=network).makespan for name in names}
            assert simulate("all_reduce", auto, size, nbytes, network=network).makespan <= 1.05 * min(times.values())
    # Without the direct algorithms, whose million messages take seconds.
    names = ["recursive_doubling", "halving_doubling", "binomial", "bine", "ring"]
    auto = compare("all_reduce", names, 1024, 64, machine).algorithm
    ring = simulate("all_reduce", "ring", 1024, 64, network=network).makespan
    assert ring > 100 * simulate("all_reduce", auto, 1024, 64, network=network).makespan


def test_fit_returns_the_constants_of_the_network_and_the_overhead() -> None:
    table = CostTable(LinkCost(30e-6, 0.5e-9), LinkCost(30e-6, 0.5e-9), gamma=0.2e-9, overhead=5e-6)
    calls = [("all_reduce", name) for name in ("recursive_doubling", "ring", "one_shot", "two_shot")]
    cells = [
        Cell(*call, 4, n, predicted(find(*call), 4, n, Machine(table, 4)))
        for call in [*calls, ("broadcast", "binomial")]
        for n in (64, 65536, 1 << 20)
    ]
    found = fit(cells)
    assert (*found.link, found.gamma, found.overhead) == pytest.approx((30e-6, 0.5e-9, 0.2e-9, 5e-6), rel=1e-6)


def test_ranks_that_share_cores_choose_by_the_work_of_all() -> None:
    link = LinkCost(300e-6, 0.5e-9)
    alone = Machine(CostTable(link, link, 0.1e-9, 100e-6), 4)
    crowded = Machine(CostTable(link, link, 0.1e-9, 100e-6, cores=2), 4)
    names = serving("all_reduce", 4)
    assert compare("all_reduce", names, 4, 1024, alone).algorithm == "one_shot"
    assert compare("all_reduce", names, 4, 1024, crowded).algorithm == "binomial"
    # 12 messages, each of which wakes a rank; their 24 KiB are sent and reduced; on 2 cores.
    work = (12 * (300e-6 + 100e-6) + 12 * 2048 * (0.5e-9 + 0.1e-9)) / 2
    assert predicted(find("all_reduce", "one_shot"), 4, 2048, crowded) == pytest.approx(work)
    assert predicted(find("all_reduce", "one_shot"), 4, 2048, alone) < work / 2
    hosts = crowded._replace(per_host=2)
    assert compare("all_reduce", names, 4, 1024, hosts).algorithm == "one_shot"


@pytest.mark.parametrize("cores", [1, 2, 3])
def test_fit_returns_the_constants_of_crowded_cores(cores: int) -> None:
    table = CostTable(LinkCost(30e-6, 0.5e-9), LinkCost(30e-6, 0.5e-9), gamma=0.2e-9, overhead=5e-6, cores=cores)
    calls = [("all_reduce", name) for name in ("recursive_doubling", "ring", "one_shot", "chunked_ring:segments=8")]
    cells = [
        Cell(*call, 4, n, predicted(find(*call), 4, n, Machine(table, 4)))
        for call in [*calls, ("broadcast", "binomial")]
        for n in (64, 65536, 1 << 20)
    ]
    found = fit(cells, cores)
    assert (*found.link, found.gamma, found.overhead) == pytest.approx((30e-6, 0.5e-9, 0.2e-9, 5e-6), rel=1e-6)


def test_constants_are_never_negative() -> None:
    noise = [Cell("broadcast", "binomial", 2, n, seconds) for n, seconds in ((8, 9e-5), (65536, 5e-5), (1 << 20, 4e-5))]
    found = fit(noise)
    assert min(*found.link, found.gamma, found.overhead) >= 0


def test_chosen_algorithm_has_the_least_predicted_time() -> None:
    for nbytes in (64, 1 << 16, 1 << 22):
        for machine in (Machine(TABLE, 12), Machine(HOSTS, 4)):
            choice = compare("all_reduce", serving("all_reduce", 12), 12, nbytes, machine)
            for label, seconds in choice.others.items():
                assert predicted(find("all_reduce", label), 12, nbytes, machine) == seconds
                assert seconds >= choice.predicted_s * (1 - 1e-5)


def test_hosts_make_a_hierarchy_worth_while() -> None:
    names = serving("all_reduce", 32)
    chosen = compare("all_reduce", names, 32, 1 << 16, Machine(HOSTS, 8))
    assert chosen.algorithm == "hierarchical:levels=8x4"
    assert chosen.options == {"levels": (8, 4)}
    flat = predicted(find("all_reduce", "ring"), 32, 1 << 16, Machine(HOSTS, 8))
    assert chosen.predicted_s < flat
    assert "levels" not in compare("all_reduce", names, 32, 1 << 16, Machine(HOSTS, 0)).algorithm


def test_names_may_carry_options() -> None:
    tree = find("all_reduce", "double_binary_tree:segments=8")
    assert (tree.name, tree.label, tree.chunks(4)) == ("double_binary_tree", "double_binary_tree:segments=8", 16)
    assert find("all_reduce", "hierarchical:levels=2x3").label == "hierarchical:levels=2x3"
    for name in ("ring:segments=2", "chunked_ring:parts=2", "chunked_ring:segments=-1", "chunked_ring:segments=2x3"):
        with pytest.raises(ValueError, match="no option"):
            find("all_reduce", name)


def test_options_of_a_name_reach_execution() -> None:
    def program(comm: un.Communicator) -> tuple[list[float], int]:
        t = torch.arange(64.0)
        with un.trace("/dev/null") as events:
            comm.all_reduce(t, algorithm="chunked_ring:segments=4")
        with pytest.raises(ValueError, match="at least 1 segment"):
            comm.all_reduce(t, algorithm="chunked_ring:segments=0")
        return t.tolist(), sum(event.kind == "send" for event in events)

    for values, messages in un.launch(program, 3, "thread"):
        assert values == (3 * torch.arange(64.0)).tolist()
        assert messages == 2 * 2 * 4


@pytest.mark.parametrize("deterministic", [False, True])
def test_all_collectives_equal_the_reference(deterministic: bool) -> None:
    def program(comm: un.Communicator) -> dict[str, list[float]]:
        def own(count: int) -> torch.Tensor:
            return torch.arange(float(count)) + 100 * comm.rank

        how, size, found = "auto", comm.size, {}
        found["all_reduce"] = own(9)
        comm.all_reduce(found["all_reduce"], algorithm=how)
        found["broadcast"] = own(5)
        comm.broadcast(found["broadcast"], src=1, algorithm=how)
        found["reduce"] = own(7)
        comm.reduce(found["reduce"], dst=2, algorithm=how)
        found["all_gather"] = torch.empty(4 * size)
        comm.all_gather_single(found["all_gather"], own(4), algorithm=how)
        found["reduce_scatter"] = torch.empty(3)
        comm.reduce_scatter_single(found["reduce_scatter"], own(3 * size), algorithm=how)
        found["all_to_all"] = torch.empty(2 * size)
        comm.all_to_all_single(found["all_to_all"], own(2 * size), algorithm=how)
        comm.barrier(algorithm=how)
        return {name: tensor.tolist() for name, tensor in found.items()}

    size = 3
    ranks = un.launch(program, size, "thread", deterministic=deterministic)

    def owns(count: int) -> list[torch.Tensor]:
        return [torch.arange(float(count)) + 100 * rank for rank in range(size)]

    for rank, found in enumerate(ranks):
        assert found["all_reduce"] == sum(owns(9)).tolist()
        assert found["broadcast"] == owns(5)[1].tolist()
        assert found["reduce"] == (sum(owns(7)) if rank == 2 else owns(7)[rank]).tolist()
        assert found["all_gather"] == torch.cat(owns(4)).tolist()
        assert found["reduce_scatter"] == sum(owns(9))[3 * rank : 3 * rank + 3].tolist()
        assert found["all_to_all"] == torch.cat([own[2 * rank : 2 * rank + 2] for own in owns(6)]).tolist()


def test_deterministic_mode_permits_balanced_trees_only() -> None:
    machine = Machine(TABLE, 4)
    for nbytes in (64, 1 << 24):
        chosen = explain(Needs("all_reduce", 4, True, True, False), nbytes, machine).algorithm
        assert find("all_reduce", chosen).balanced


def chosen_by(comm: un.Communicator) -> tuple[str, str, str]:
    """Return what a call with "auto" ran, what a plan says, and the table's hash in the trace."""
    with un.trace("/dev/null") as events:
        comm.all_reduce(torch.ones(256), algorithm="auto")
    (ran,) = (event.detail["algorithm"] for event in events if event.kind == "begin")
    (shown,) = (event.detail["hash"] for event in events if event.kind == "cost_table")
    return ran, comm.plan("all_reduce", 1024).algorithm, shown


def test_all_ranks_use_the_table_that_rank_0_measured(own_folder: Path) -> None:
    def program(comm: un.Communicator) -> tuple[CostTable, str, str, str]:
        return comm.tune(seconds=0.1), *chosen_by(comm)

    first, *others = un.launch(program, 3, "thread")
    assert others == [first, first]
    table, ran, planned, shown = first
    assert table.measured
    assert ran == planned
    assert shown == table.hash
    (path,) = own_folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert CostTable.from_json(path.read_text()) == table
    # Later programs load it, on the same number of ranks only.
    assert un.launch(chosen_by, 3, "thread")[1] == (ran, ran, shown)
    assert un.launch(chosen_by, 2, "thread")[0][2] != shown


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda text: text[:40], "ignored"),
        (lambda text: text.replace('"format": 2', '"format": 99'), "format 99"),
        (lambda text: text.replace('"gamma": ', '"gamma": 1'), "do not match the hash"),
        (lambda text: text.replace('"thread"', '"other"'), "other hosts"),
        (lambda text: "[]", "no cost table"),
    ],
)
def test_a_damaged_table_is_ignored_with_a_line(
    own_folder: Path, damage: object, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert callable(damage)
    un.launch(lambda comm: comm.tune(seconds=0.01), 2, "thread")
    (path,) = own_folder.iterdir()
    path.write_text(damage(path.read_text()))
    with caplog.at_level(logging.INFO, "unisono"):
        un.launch(chosen_by, 2, "thread")
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert reason in warning
    assert str(path) in warning
    assert any("(built-in)" in record.getMessage() for record in caplog.records)


def test_environment_file_and_argument_override(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.json"
    path.write_text(TABLE.with_overrides({"all_reduce": "bruck"}).to_json())
    monkeypatch.setenv("UNISONO_TUNE_FILE", str(path))
    assert un.launch(chosen_by, 3, "thread")[0] == ("bruck", "bruck", TABLE.hash)
    monkeypatch.setenv("UNISONO_ALGORITHM", "all_reduce=chunked_ring:segments=2, broadcast=binomial")
    assert un.launch(chosen_by, 3, "thread")[2][:2] == ("chunked_ring:segments=2",) * 2

    def argument(comm: un.Communicator) -> tuple[str, str, bool, str]:
        plan = comm.plan("all_reduce", 1000, algorithm="ring")
        return plan.algorithm, plan.why, "ring" in plan.others, comm.plan("barrier", 0).why

    name, why, listed, other = un.launch(argument, 2, "thread")[0]
    assert (name, why, listed) == ("ring", "set by the argument", False)
    assert other.startswith("the fastest of")


def test_plans_share_nothing_that_can_change() -> None:
    needs, machine = Needs("all_reduce", 4, True, False, False), Machine(TABLE, 4)
    for forced, why in ((None, "the fastest of"), ("ring", "asked for")):
        plans = [explain(needs, 1024, machine, forced, why) for _ in range(2)]
        assert plans[0] == plans[1]
        assert plans[0].why.startswith(why)
        assert plans[0].others is not plans[1].others
        assert plans[0].options is not plans[1].options


def test_wrong_overrides_are_one_error_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_ALGORITHM", "all_reduce=rang")

    def program(comm: un.Communicator) -> str:
        with pytest.raises(ValueError, match="UNISONO_ALGORITHM: unknown all_reduce algorithm 'rang'") as error:
            comm.all_reduce(torch.ones(1), algorithm="auto")
        return str(error.value)

    assert len(set(un.launch(program, 2, "thread"))) == 1
    with pytest.raises(ValueError, match="'allreduce' is no collective"):
        parse_overrides("allreduce=ring")


def test_overrides_that_cannot_serve_a_call_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_ALGORITHM", "all_reduce=ring")

    def program(comm: un.Communicator) -> None:
        with pytest.raises(ValueError, match="does not keep the balanced tree"):
            comm.all_reduce(torch.ones(8), algorithm="auto")

    un.launch(program, 2, "thread", deterministic=True)


def test_plan_is_shown_as_a_table() -> None:
    from IPython.core.formatters import HTMLFormatter

    plan = compare("all_reduce", serving("all_reduce", 8), 8, 1 << 20, Machine(TABLE, 8))
    assert repr(plan).startswith(f"all_reduce: {plan.algorithm}, the fastest of")
    assert all(name in repr(plan) for name in plan.others)
    assert HTMLFormatter()(plan).startswith("<table>")
    with pytest.raises(ValueError, match="unknown collective"):
        un.launch(lambda comm: comm.plan("allreduce", 8), 1, "thread")


def test_json_has_a_format_and_a_hash() -> None:
    found = json.loads(TABLE.to_json())
    assert (found["format"], found["hash"]) == (2, TABLE.hash)
    with pytest.raises(ValueError, match="at least 0 s"):
        CostTable(LinkCost(-1.0, 0.0), LinkCost(0.0, 0.0))


def test_command_measures_and_stores(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "-n", "2", "--backend", "thread", "--seconds", "0.05", "--json"]) == 0
    table = CostTable.from_json(capsys.readouterr().out)
    (path,) = own_folder.iterdir()
    assert CostTable.from_json(path.read_text()) == table
    assert main(["tune", "-n", "0"]) == 2
