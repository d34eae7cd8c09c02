"""The parts between a call and its messages: layout, staging, choice, and the interpreter's pipelining."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import pytest
import torch
from meta_tensors import Hollow

import unisono as un
from unisono.collectives.algorithms import ALGORITHMS, find
from unisono.collectives.algorithms.step import Move
from unisono.collectives.executor import IN_FLIGHT, Flat, PartialSums, Pieces, Schedule, ScratchPool, even_edges
from unisono.core.call import Call
from unisono.core.staging import Staging
from unisono.core.tensors import check_apart, check_reducible, check_tensor, parse_op
from unisono.core.types import Message, ReduceOp, Work
from unisono.transports import TRANSPORTS
from unisono.transports.thread import ThreadTransport

CPU = frozenset({"cpu"})


def test_even_edges_cover_and_balance() -> None:
    for numel in (0, 1, 5, 16, 17):
        for parts in (1, 2, 5, 16):
            edges = even_edges(numel, parts)
            sizes = [b - a for a, b in itertools.pairwise(edges)]
            assert (edges[0], edges[-1], len(sizes)) == (0, numel, parts)
            assert max(sizes) - min(sizes) <= 1


def test_regions_cover_a_run_in_segments() -> None:
    t = torch.arange(10.0)
    regions = Flat(t, even_edges(t.numel(), 5)).regions(1, 4, segment_bytes=16)
    assert [(r.start, r.stop) for r in regions] == [(2, 6), (6, 8)]
    assert torch.cat([r.tensor for r in regions]).tolist() == [2, 3, 4, 5, 6, 7]


def test_missing_buffers_are_allocated_with_the_right_type() -> None:
    like = torch.zeros(3, dtype=torch.int16)
    (region,) = Pieces({}, like).regions(2, 3, 100)
    assert (region.tensor.dtype, region.tensor.numel()) == (torch.int16, 3)


def test_partial_sums_are_stored_beside_the_inputs() -> None:
    inputs, output = [torch.ones(2), torch.ones(3), torch.ones(4)], torch.zeros(3)
    sums = PartialSums(inputs, 1, output)

    def memory(move: Move, *, receive: bool = False) -> list[torch.Tensor]:
        return [region.tensor for packed in sums.messages(move, 100, receive=receive) for region in packed]

    assert [t.data_ptr() for t in memory(Move(0, 1, 3))] == [inputs[1].data_ptr(), inputs[2].data_ptr()]
    (first,) = memory(Move(0, 2, 3), receive=True)
    assert first.numel() == 4
    assert first.data_ptr() != inputs[2].data_ptr()
    assert [t.data_ptr() for t in memory(Move(0, 2, 3))] == [first.data_ptr()]
    assert [t.data_ptr() for t in memory(Move(0, 1, 2), receive=True)] == [output.data_ptr()]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_reduce_scatter_only_reads_its_inputs(size: int) -> None:
    def program(comm: un.Communicator) -> None:
        lengths = [3 + place for place in range(size)]
        for name in ("auto", *un.algorithms.serving("reduce_scatter", size)):
            inputs = [torch.full((n,), float(comm.rank + place)) for place, n in enumerate(lengths)]
            copies, output = [t.clone() for t in inputs], torch.empty(lengths[comm.rank])
            comm.reduce_scatter(output, inputs, algorithm=name)
            assert all(map(torch.equal, inputs, copies)), name
            assert output.tolist() == [sum(range(size)) + size * comm.rank] * len(output), name
            whole = torch.arange(size * 4, dtype=torch.float64)
            comm.reduce_scatter_single(whole[4 * comm.rank : 4 * comm.rank + 4], whole, algorithm=name)
            assert whole[4 * comm.rank :][:4].tolist() == [size * (4 * comm.rank + i) for i in range(4)], name

    un.launch(program, size, "thread")


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(3).expand(2, 3), torch.zeros(1).expand(4), torch.zeros(9).as_strided((3, 3), (1, 1))],
)
def test_overlapping_targets_are_rejected(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="share memory"):
        check_tensor(tensor, "t", CPU, written=True)
    check_tensor(tensor, "t", CPU, written=False)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 6).t(),
        torch.zeros(4, 6)[:, ::2],
        torch.zeros(9).as_strided((2, 3), (3, 2)),
        torch.zeros(1, 5).expand(1, 5),
        torch.zeros(()),
        torch.zeros(0, 3),
    ],
)
def test_strided_targets_are_fine(tensor: torch.Tensor) -> None:
    check_tensor(tensor, "t", CPU, written=True)


def test_unsendable_tensors() -> None:
    with pytest.raises(TypeError, match="is a list of str"):
        check_tensor(["1"], "t", CPU, written=False)
    with pytest.raises(ValueError, match="to_dense"):
        check_tensor(torch.eye(2).to_sparse(), "t", CPU, written=False)
    with pytest.raises(ValueError, match="on meta"):
        check_tensor(torch.empty(2, device="meta"), "t", CPU, written=False)
    with pytest.raises(ValueError, match="Hollow, whose elements are not in its own memory"):
        check_tensor(Hollow(torch.ones(2)), "t", CPU, written=False)
    hidden = torch.ones(2, requires_grad=True) * 2
    with pytest.raises(ValueError, match="gradient history"):
        check_tensor(hidden, "t", CPU, written=False)
    with torch.no_grad():
        check_tensor(hidden, "t", CPU, written=False)


def test_columns_are_disjoint_and_overlapping_slices_are_not() -> None:
    matrix = torch.zeros(4, 3)
    check_apart([(f"column {i}", matrix[:, i]) for i in range(3)])
    flat = torch.zeros(10)
    with pytest.raises(ValueError, match="a and b share memory"):
        check_apart([("a", flat[:6]), ("b", flat[5:])])
    check_apart([], [("a", flat), ("b", flat)])


def test_staging_copies_only_what_is_strided() -> None:
    staging, dense = Staging(), torch.arange(6.0)
    assert staging.flat(dense, read=True, write=True).data_ptr() == dense.data_ptr()
    assert not staging.before
    view = torch.zeros(3, 4)[:, 1]
    flat = staging.flat(view, read=False, write=True)
    flat.copy_(torch.tensor([1.0, 2.0, 3.0]))
    for action in staging.after:
        action()
    assert view.tolist() == [1.0, 2.0, 3.0]


def test_conjugate_views_are_resolved() -> None:
    values = torch.tensor([1 + 2j, 3 - 1j])

    def program(comm: un.Communicator) -> torch.Tensor:
        t = values.clone().conj()
        comm.all_reduce(t)
        return t.resolve_conj()

    for result in un.launch(program, 2, "thread"):
        assert torch.equal(result, values.conj().resolve_conj() * 2)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_operations_by_name() -> None:
    assert parse_op("AVG") is ReduceOp.AVG
    assert parse_op(torch.distributed.ReduceOp.MAX) is ReduceOp.MAX
    with pytest.raises(ValueError, match="unknown reduce operation 'mean'; known: sum, avg"):
        parse_op("mean")
    with pytest.raises(ValueError, match="lose the fraction"):
        check_reducible(ReduceOp.AVG, torch.int64)
    with pytest.raises(ValueError, match=r"does not support band on torch\.float32"):
        check_reducible(ReduceOp.BAND, torch.float32)
    with pytest.raises(ValueError, match=r"does not support max on torch\.complex64"):
        check_reducible(ReduceOp.MAX, torch.complex64)
    # Torch can add these, and divide their parts.
    check_reducible(ReduceOp.AVG, torch.complex32)
    check_reducible(ReduceOp.SUM, torch.complex32)


def test_cheapest_algorithm_depends_on_size() -> None:
    def program(comm: un.Communicator) -> list[str]:
        names = []
        for count in (1, 1 << 22):
            with un.trace("/dev/null") as events:
                comm.all_reduce(torch.ones(count))
            names += [e.detail["algorithm"] for e in events if e.kind == "begin"]
        return names

    short, long = un.launch(program, 4, "thread")[0]
    assert short == "one_shot"
    assert long != "one_shot"


def test_fewest_bytes_can_be_requested() -> None:
    def program(comm: un.Communicator) -> str:
        with un.trace("/dev/null") as events:
            comm.all_reduce(torch.ones(1), algorithm="fewest_bytes")
        (name,) = (e.detail["algorithm"] for e in events if e.kind == "begin")
        return str(name)

    costs = {name: ALGORITHMS["all_reduce"][name].cost(4, 12).sent for name in ALGORITHMS["all_reduce"].names()}
    for name in un.launch(program, 4, "thread"):
        assert costs[name] == min(costs.values())


def test_at_most_eight_batches_are_in_flight() -> None:
    flying, most = 0, 0

    class Counting:
        rank, size = 0, 2

        def post(self, batch: object) -> object:
            nonlocal flying, most
            flying += 1
            most = max(most, flying)
            return self

        def wait(self, timeout: float | None = None) -> None:
            nonlocal flying
            flying -= 1

        def wait_received(self, timeout: float | None = None) -> None: ...

    ring, buffer = Schedule(find("all_reduce", "ring"), 0, 2, 0, 40, ScratchPool()), torch.zeros(1000)
    ring(Counting(), Call("all_reduce", (buffer,), (buffer,), ReduceOp.SUM), time.monotonic() + 10.0)
    assert (flying, most) == (0, IN_FLIGHT)


def test_tensors_of_an_unsupported_device_are_staged() -> None:
    class Elsewhere(ThreadTransport):
        host_staged = frozenset({"cpu"})

        def post(self, batch: Sequence[Message]) -> Work:
            posted.extend(m.tensor.data_ptr() for m in batch)
            return super().post(batch)

    posted: list[int] = []

    def program(comm: un.Communicator) -> tuple[int, list[float]]:
        t = torch.full((3,), comm.rank + 1.0)
        comm.all_reduce(t, algorithm="binomial")
        return t.data_ptr(), t.tolist()

    TRANSPORTS.register("elsewhere", Elsewhere)
    try:
        results = un.launch(program, 2, "elsewhere")
    finally:
        TRANSPORTS.unregister("elsewhere")
    assert [values for _, values in results] == [[3.0] * 3] * 2
    assert posted
    assert not {place for place, _ in results} & set(posted)


def _failed_step(comm: un.Communicator) -> list[str]:
    if comm.rank == 0:
        comm.recv(torch.ones(4), 1)
    try:
        comm.all_reduce(torch.ones(4), algorithm="ring")
    except un.errors.DeadlockError as error:
        return error.__notes__
    return []


def test_deadlock_keeps_the_note_that_names_the_step() -> None:
    found = un.simulate(_failed_step, 2, check="off", timeout=1.0, on_failure="continue").results
    assert found[1] == ["in step 1 of the algorithm"]
