"""Torch's own tools see the backend as they see gloo: autograd's version counters, dispatch modes, its debug level."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch_ranks import message, on_ranks

from unisono.errors import UnavailableError

Call = tuple[str, list[torch.Tensor], Any]


def calls(group: Any) -> Iterator[Call]:
    """Collectives and messages of two ranks: a name, the tensors that are passed, and the call."""
    first = dist.get_rank() == 0

    def many() -> list[torch.Tensor]:
        return [torch.ones(4) for _ in range(2)]

    one, other, whole, half = torch.ones(4), torch.ones(4), torch.ones(8), torch.ones(2)
    given, taken = many(), many()
    sparse = torch.eye(3).to_sparse()
    yield "all_reduce", [one], lambda: dist.all_reduce(one, group=group)
    yield "all_reduce, asynchronous", [one], lambda: dist.all_reduce(one, group=group, async_op=True).wait()
    yield "all_reduce, sparse", [sparse], lambda: dist.all_reduce(sparse, group=group)
    yield "all_reduce_coalesced", given, lambda: dist.all_reduce_coalesced(given, group=group)
    yield "broadcast", [one], lambda: dist.broadcast(one, 0, group=group)
    # Other ranks' tensors are anything afterwards.
    reduced = torch.ones(4)
    yield "reduce", [reduced] if first else [], lambda: dist.reduce(reduced, 0, group=group)
    yield "all_gather", [one, *taken], lambda: dist.all_gather(taken, one, group=group)
    yield "all_gather_single", [whole, one], lambda: dist.all_gather_into_tensor(whole, one, group=group)
    yield "gather", [one, *taken], lambda: dist.gather(one, taken if first else None, 0, group=group)
    yield "scatter", [one, *given], lambda: dist.scatter(one, given if first else None, 0, group=group)
    yield "reduce_scatter", [one, *given], lambda: dist.reduce_scatter(one, given, group=group)
    yield "reduce_scatter_single", [half, one], lambda: dist.reduce_scatter_tensor(half, one, group=group)
    yield "all_to_all", [*taken, *given], lambda: dist.all_to_all(taken, given, group=group)
    yield "all_to_all_single", [one, other], lambda: dist.all_to_all_single(one, other, group=group)
    for source in (0, None):
        yield (
            "a message",
            [one],
            lambda s=source: dist.send(one, 1, group) if first else dist.recv(one, s, group),
        )


def written(group: Any) -> list[object]:
    """Of each call, which of its tensors autograd takes for changed."""
    found: list[object] = []
    for name, tensors, call in calls(group):
        before = [t._version for t in tensors]
        call()
        found.append([name, *(t._version > was for t, was in zip(tensors, before, strict=True))])
    return found


def written_on_both() -> tuple[object, object]:
    return written(dist.group.WORLD), written(dist.new_group(backend="gloo"))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_autograd_notices_the_writes_that_it_notices_on_gloo(tmp_path: Path, transport: str) -> None:
    for ours, theirs in on_ranks(written_on_both, 2, tmp_path, transport=transport):
        assert ours == theirs


def trains_through_an_activation() -> float:
    y = torch.ones(2, requires_grad=True).relu()
    dist.all_reduce(y)
    y.sum().backward()
    return y.sum().item()


@pytest.mark.filterwarnings("ignore:c10d")
def test_activation_that_a_layer_saved_may_be_reduced(tmp_path: Path) -> None:
    assert on_ranks(trains_through_an_activation, 2, tmp_path) == [4.0, 4.0]


class Seen(TorchDispatchMode):
    """Mode that notes the operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Boxed(torch.Tensor):
    """Wrapper subclass around a plain tensor."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Boxed:
        made: Boxed = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree_map_only(Boxed, lambda t: t.held, args), **(kwargs or {}))


def seen(group: Any) -> list[object]:
    """Operators that a mode sees of each call, and what the call gives."""
    found: list[object] = []
    for name, tensors, call in calls(group):
        with Seen() as outer, Seen() as inner:
            call()
        assert outer.names == inner.names
        found.append([name, [t.to_dense().tolist() for t in tensors], [n for n in inner.names if "c10d" in n]])
    with Seen() as mode:
        dist.barrier(group)
    return [*found, [n for n in mode.names if "c10d" in n]]


def seen_on_both() -> tuple[object, object]:
    return seen(dist.group.WORLD), seen(dist.new_group(backend="gloo"))


def test_modes_see_every_call_as_on_gloo(tmp_path: Path) -> None:
    for ours, theirs in on_ranks(seen_on_both, 2, tmp_path):
        assert ours == theirs
        assert "c10d.allreduce_.default" in str(ours)


def programs(group: Any) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Functions for `make_fx`. It traces no wait of a work, so a graph has no result of a call that returns early."""
    first, size = dist.get_rank() == 0, dist.get_world_size()

    def reduced(op: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        return with_result(lambda t, other, many: dist.all_reduce(t, op, group))

    def with_result(call: Callable[..., Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        def program(x: torch.Tensor) -> torch.Tensor:
            t, other, many = x * 2, x.repeat(size), [x + part for part in range(size)]
            call(t, other, many)
            return torch.cat([t, other, *many]) + 1

        return program

    calls: dict[str, Callable[..., Any]] = {
        "all_gather": lambda t, other, many: dist.all_gather(many, t, group),
        "all_gather_single": lambda t, other, many: dist.all_gather_into_tensor(other, t, group),
        "all_reduce_coalesced": lambda t, other, many: dist.all_reduce_coalesced(many, dist.ReduceOp.MIN, group),
        "all_to_all": lambda t, other, many: dist.all_to_all(many, list((other + 5).chunk(size)), group),
        "all_to_all_single": lambda t, other, many: dist.all_to_all_single(other, other * 3, group=group),
        "barrier": lambda t, other, many: dist.barrier(group),
        "broadcast": lambda t, other, many: dist.broadcast(t, 1, group),
        "gather": lambda t, other, many: dist.gather(t, many if first else None, 0, group),
        "reduce": lambda t, other, many: dist.reduce(t if first else t * 1, 0, dist.ReduceOp.MAX, group),
        "reduce_scatter": lambda t, other, many: dist.reduce_scatter(t, many, dist.ReduceOp.PRODUCT, group),
        "reduce_scatter_single": lambda t, other, many: dist.reduce_scatter_tensor(t, other, group=group),
        "scatter": lambda t, other, many: dist.scatter(t, many if first else None, 0, group),
    }
    return {
        **{f"all_reduce {op}": reduced(getattr(dist.ReduceOp, op)) for op in ("SUM", "PRODUCT", "MIN", "MAX")},
        **{name: with_result(call) for name, call in calls.items()},
        "functional": lambda x: functional.all_reduce(x * 2, "max", group) + 1,
    }


def traced(chosen: str) -> list[object]:
    """Of each program: operators in its graph on our group and on gloo, and what graph and program give on ours."""
    x = torch.arange(2.0) + dist.get_rank() + 1
    gloo = programs(dist.new_group(backend="gloo"))
    found: list[object] = []
    for name, program in programs(dist.group.WORLD).items():
        if chosen not in name:
            continue
        graph, other = (make_fx(each)(x) for each in (program, gloo[name]))
        names = [[n for n in (str(node.target) for node in each.graph.nodes) if "c10d" in n] for each in (graph, other)]
        found.append([name, *names, graph(x + 1).tolist(), program(x + 1).tolist()])
    return found


def check_graphs(ranks: list[list[Any]]) -> None:
    for name, ours, theirs, from_graph, from_program in (each for rank in ranks for each in rank):
        assert ours == theirs != [], name
        assert from_graph == from_program, name


@pytest.mark.filterwarnings("ignore")
def test_graph_calls_what_the_program_calls(tmp_path: Path) -> None:
    check_graphs(on_ranks(traced, 2, tmp_path, "all_reduce MAX"))


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_graphs_call_what_the_programs_call(tmp_path: Path, ranks: int, transport: str) -> None:
    check_graphs(on_ranks(traced, ranks, tmp_path, "", transport=transport))


def operated(group: Any) -> list[object]:
    """What torch's operators give that a program calls itself."""
    c10d: Any = torch.ops.c10d
    boxed, sums = group.boxed(), torch.classes.c10d.ReduceOp()
    one, whole, half = torch.arange(4.0) + dist.get_rank(), torch.zeros(8), torch.zeros(2)
    splits = [5, 3] if dist.get_rank() else [3, 5]
    calls = [
        lambda: c10d.allreduce_([one], boxed, sums, None)[1],
        lambda: c10d.broadcast_([one], boxed, 1, 0, False)[1],
        lambda: c10d._allgather_base_(whole, one, boxed)[1],
        lambda: c10d._reduce_scatter_base_(half, one, boxed, sums)[1],
        lambda: c10d.alltoall_base_(whole, whole * 2, boxed, splits, splits),
        lambda: c10d.barrier(one, boxed, []),
        lambda: c10d.recv_any_source_([one[:2]], boxed, 3) if dist.get_rank() else c10d.send([half], boxed, 1, 3),
    ]
    for call in calls:
        dist.Work.unbox(call()).wait()
    c10d.monitored_barrier_(one, boxed, [], 10_000, True)
    return [one.tolist(), whole.tolist(), half.tolist()]


def operated_on_both() -> list[object]:
    from unisono.interop.options import UnisonoWork

    tensor = torch.ones(1 << 12)
    with Seen():
        work = dist.all_reduce(tensor, async_op=True)
    assert type(work) is UnisonoWork
    assert work.wait()
    assert work.result()[0].tolist() == tensor.tolist()
    boxed: Any = dist.group.WORLD.boxed()  # type: ignore[union-attr]
    wrong = message(lambda: torch.ops.c10d.broadcast_([tensor], boxed, 7, 0, False))
    return [operated(dist.group.WORLD), operated(dist.new_group(backend="gloo")), wrong.partition(":")[0]]


def test_operators_give_what_they_give_on_gloo(tmp_path: Path) -> None:
    for ours, theirs, wrong in on_ranks(operated_on_both, 2, tmp_path):
        assert ours == theirs
        assert wrong == "ValueError"


def counted(group: Any) -> list[object]:
    """Collectives of steps of FSDP2, DDP and DTensor, and their results."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = DeviceMesh.from_group(group, "cpu")
    torch.manual_seed(0)
    sharded, copied = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)) for _ in range(2))
    fully_shard(sharded, mesh=mesh)
    parallel = DistributedDataParallel(copied, process_group=group)
    found: list[object] = []
    for step in (
        lambda: sharded(torch.ones(2, 4)).sum().backward(),
        lambda: parallel(torch.ones(2, 4)).sum().backward(),
        lambda: found.append(distribute_tensor(torch.ones(4), mesh, [Shard(0)]).redistribute(mesh, [Replicate()])),
    ):
        with CommDebugMode() as mode:
            step()
        found.append({str(name): count for name, count in mode.get_comm_counts().items()})
    gathered = found.pop(2)
    assert isinstance(gathered, torch.Tensor)
    grads = [p.grad.full_tensor() for p in sharded.parameters()] + [p.grad for p in copied.parameters()]  # type: ignore[union-attr]
    return [*found, gathered.to_local().tolist(), *(g.tolist() for g in grads)]  # type: ignore[attr-defined]


def counted_on_both() -> tuple[list[object], list[object]]:
    gloo = dist.new_group(backend="gloo")
    return counted(dist.group.WORLD), counted(gloo)


def test_comm_debug_mode_counts_as_on_gloo(tmp_path: Path) -> None:
    for ours, theirs in on_ranks(counted_on_both, 2, tmp_path):
        assert ours == theirs
        assert all(isinstance(counts, dict) and sum(counts.values()) for counts in ours[:3])


def tensors_without_elements() -> list[object]:
    """Of tensors that the dispatcher handles: nothing moves for a fake one, and a wrapper's inner tensor is reduced."""
    real = torch.ones(4)
    work = dist.all_reduce(real, async_op=True)
    with FakeTensorMode():
        fake = torch.ones(4)
        dist.all_reduce(fake)
        dist.all_gather([torch.empty(4) for _ in range(2)], fake)
        # The waiter runs it.
        work.wait()
    dist.all_reduce(fake, async_op=True).wait()
    meta = torch.ones(4, device="meta")
    dist.broadcast(meta, 0)
    inner = torch.ones(4)
    dist.all_reduce(Boxed(inner))
    with Seen() as mode:
        dist.all_reduce(Boxed(inner))
    with torch._C._DisableTorchDispatch(), Seen():
        dist.all_reduce(inner)
    return [real.tolist(), type(fake).__name__, meta.device.type, inner.tolist(), mode.names]


def test_fake_meta_and_wrapper_tensors(tmp_path: Path) -> None:
    expected = [[2.0] * 4, "FakeTensor", "meta", [8.0] * 4, ["c10d.allreduce_.default"]]
    assert on_ranks(tensors_without_elements, 2, tmp_path) == [expected] * 2


def asynchronous_mismatches() -> list[str]:
    rank = dist.get_rank()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    groups = [dist.new_group() for _ in range(3)]
    dist.set_debug_level(dist.DebugLevel.OFF)
    agreed = torch.ones(4)
    dist.all_reduce(agreed, group=groups[0], async_op=True).wait()
    wrong = [
        lambda: dist.all_reduce(torch.ones(4 + rank), group=groups[0], async_op=True),
        lambda: dist.broadcast(torch.ones(4), rank, group=groups[1], async_op=True),
        lambda: (dist.barrier if rank else dist.all_reduce)(
            *([] if rank else [torch.ones(4)]), group=groups[2], async_op=True
        ),
    ]
    return [str(agreed.tolist()), *(message(call).partition(":")[0] for call in wrong)]


def test_detail_raises_mismatches_in_the_call(tmp_path: Path) -> None:
    expected = [str([2.0] * 4), *["MismatchError"] * 3]
    assert on_ranks(asynchronous_mismatches, 2, tmp_path) == [expected] * 2


def trained_and_counted() -> tuple[object, object, float]:
    gloo = dist.new_group(backend="gloo")
    return counted(dist.group.WORLD), counted(gloo), trains_through_an_activation()


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:c10d")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("transport", ["shm", "tcp", "gloo"])
def test_counts_and_activations_on_every_transport(tmp_path: Path, ranks: int, transport: str) -> None:
    for ours, theirs, total in on_ranks(trained_and_counted, ranks, tmp_path, transport=transport):
        assert str(ours[:3]) == str(theirs[:3])
        assert total == 2.0 * ranks


# -- hooks of torch 2.14 ---------------------------------------------------------------------------
NATIVE: Any = torch._C._distributed_c10d
HOOKS = hasattr(dist.ProcessGroup, "register_pre_hook")
with_hooks = pytest.mark.skipif(not HOOKS, reason="torch has hooks since 2.14")


def hooked(group: Any) -> list[object]:
    """Of each call: what hooks before and after it receive, and what the call gives."""
    told: list[object] = []
    group.register_pre_hook(
        1,
        lambda a: told.append([str(a.name), a.async_op, a.root, a.op_id, len(a.input_tensors), len(a.output_tensors)]),
    )
    group.register_post_hook(2, lambda a: told.append([str(a.name), a.async_op, a.op_id, type(a.work).__name__]))
    for name, tensors, call in calls(group):
        call()
        told.append([name, [t.to_dense().tolist() for t in tensors]])
    with Seen() as mode:
        dist.barrier(group)
    model = DistributedDataParallel(nn.Linear(2, 1), process_group=group)
    model(torch.ones(1, 2)).sum().backward()
    group.unregister_pre_hook(1)
    group.unregister_post_hook(2)
    dist.barrier(group)
    return [*told, [n for n in mode.names if "c10d" in n]]


def hooked_on_both() -> tuple[object, object]:
    return hooked(dist.group.WORLD), hooked(dist.new_group(backend="gloo"))


@with_hooks
def test_hooks_are_called_as_on_gloo(tmp_path: Path) -> None:
    for ours, theirs in on_ranks(hooked_on_both, 2, tmp_path):
        assert ours == theirs
        assert str(ours).count("HookOpName.ALLREDUCE'") >= 8


def with_hook_that_calls() -> list[object]:
    """A hook makes a call of its own; the program gets works that know when they are done."""
    group: Any = dist.group.WORLD
    counted = torch.zeros(1)
    inside: list[bool] = []

    def count(args: object) -> None:
        if not inside:
            inside.append(True)
            dist.all_reduce(counted.add_(1))
            inside.clear()

    group.register_pre_hook(1, count)
    group.register_post_hook(2, count)
    tensor = torch.ones(2)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    mismatch = message(lambda: dist.all_reduce(torch.ones(1 + dist.get_rank())))
    return [tensor.tolist(), counted.item(), work.is_completed(), work.exception(), mismatch.partition(":")[0]]


@with_hooks
def test_hooks_may_call_and_works_are_ours(tmp_path: Path) -> None:
    # Before a call and after it, for two calls; the sum over two ranks doubles each time.
    assert on_ranks(with_hook_that_calls, 2, tmp_path) == [[[2.0, 2.0], 14.0, True, None, "MismatchError"]] * 2


def hooks_that_attach_themselves() -> list[str]:
    group: Any = dist.new_group()
    recorder = NATIVE.FlightRecorderHook.attach(group)
    dist.all_reduce(torch.ones(3), group=group)
    recorder.remove()
    attached = NATIVE.NanCheckHook.attach(group)
    refused = message(lambda: dist.all_reduce(torch.tensor([torch.nan]), group=group))
    attached.remove()
    nothing = torch.tensor([torch.nan])
    dist.all_reduce(nothing, group=group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_DIST_NAN_CHECK", "1")
        checked: Any = dist.new_group()
    return [
        refused,
        message(lambda: dist.all_reduce(torch.tensor([torch.nan]), group=checked)),
        NATIVE._dump_fr_trace_json(True, False).decode(),
        group.group_name,
    ]


@with_hooks
def test_hooks_that_attach_themselves_are_called(tmp_path: Path) -> None:
    for nan, nan_by_environment, trace, name in on_ranks(hooks_that_attach_themselves, 2, tmp_path):
        assert [nan, nan_by_environment] == ["RuntimeError: NaN found in input tensor."] * 2
        assert f'"process_group":["{name}",' in trace
        assert '"profiling_name":"c10d:allreduce"' in trace


def registrations() -> None:
    group: Any = dist.group.WORLD
    if not HOOKS:
        with pytest.raises(UnavailableError, match="hooks of process groups need torch"):
            group.register_pre_hook(1, print)
    with pytest.raises(UnavailableError, match="no abort hooks"):
        group.register_abort_hook(1, print)
    with pytest.raises(UnavailableError, match="rebuild"):
        group.reconfigure(None)
    with pytest.raises(UnavailableError, match="rebuild"):
        group.get_reconfigure_handle()
    with pytest.raises(UnavailableError, match="windows"):
        group.new_window()
    dist.all_reduce(torch.ones(1))


def test_what_is_never_called_is_refused(tmp_path: Path) -> None:
    on_ranks(registrations, 2, tmp_path)
