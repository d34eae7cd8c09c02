"""Right programs that use what torch builds on process groups: their results do not depend on a watch.

Each gets its rank and the number of ranks, and returns what it has computed.
"""

from __future__ import annotations

import datetime as dt
import tempfile
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch.distributed.algorithms import Join
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

__all__ = ["FEATURES"]

FEATURES: dict[str, Callable[[int, int], Any]] = {}


def feature(program: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
    FEATURES[program.__name__] = program
    return program


# -- models and training ---------------------------------------------------------------------------
def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4))


class Branches(nn.Module):
    """A model of which each step uses one part, or the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])

    def forward(self, inputs: torch.Tensor, part: int) -> torch.Tensor:
        return self.parts[part](inputs)


def batch(rank: int, step: int, count: int = 8) -> torch.Tensor:
    return torch.randn(4, count, generator=torch.Generator().manual_seed(100 * step + rank))


def trained(model: nn.Module, rank: int, steps: int = 4, optimizer: Any = None) -> list[torch.Tensor]:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(rank, step)).square().sum().backward()
        optimizer.step()
    return weights(model)


def weights(model: nn.Module) -> list[torch.Tensor]:
    whole = model.state_dict().values()
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in whole]


def mesh_of(*sizes: int) -> Any:
    return init_device_mesh("cpu", sizes, mesh_dim_names=tuple("xyz"[: len(sizes)]))


# -- DistributedDataParallel -----------------------------------------------------------------------
@feature
def ddp_with_a_static_graph(rank: int, size: int) -> Any:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = perceptron()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            for layer in self.inner:
                inputs = checkpoint(layer, inputs, use_reentrant=False)
            return inputs

    return trained(DistributedDataParallel(Checkpointed(), static_graph=True), rank)


@feature
def ddp_with_unused_parameters(rank: int, size: int) -> Any:
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        # Ranks take different parts in some steps, and the same one in others.
        model(batch(rank, step), (step + rank * (step % 3 == 0)) % 2).sum().backward()
        optimizer.step()
    return weights(model)


@feature
def ddp_that_accumulates(rank: int, size: int) -> Any:
    model = DistributedDataParallel(perceptron(), gradient_as_bucket_view=True, bucket_cap_mb=0.0002)
    for step in range(4):
        with nullcontext() if step % 2 else model.no_sync():
            model(batch(rank, step)).sum().backward()
    return [each.grad for each in model.parameters()]


@feature
def ddp_with_buffers(rank: int, size: int) -> Any:
    torch.manual_seed(0)
    return trained(DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))), rank)


@feature
def ddp_with_hooks(rank: int, size: int) -> Any:
    def averaged(state: None, bucket: Any) -> Any:
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / size)

    # DDP reads the annotations, which here are texts.
    averaged.__annotations__ = {"bucket": dist.GradBucket}
    found = []
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, averaged):
        model = DistributedDataParallel(perceptron())
        model.register_comm_hook(None, hook)
        found += trained(model, rank)
    return found


@feature
def ddp_with_power_sgd(rank: int, size: int) -> Any:
    model = DistributedDataParallel(perceptron())
    options = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2, "min_compression_rate": 0.5}
    model.register_comm_hook(powerSGD_hook.PowerSGDState(None, **options), powerSGD_hook.powerSGD_hook)
    return trained(model, rank, steps=6)


@feature
def ddp_with_local_steps(rank: int, size: int) -> Any:
    model = DistributedDataParallel(perceptron())
    pairs, _ = dist.new_subgroups(2)
    state = post_localSGD_hook.PostLocalSGDState(None, pairs, 2)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=2)
    for step in range(6):
        model(batch(rank, step)).sum().backward()
        averager.average_parameters(model.parameters())
    return weights(model)


@feature
def ddp_with_uneven_inputs(rank: int, size: int) -> Any:
    model = DistributedDataParallel(perceptron())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with Join([model, optimizer]):
        trained(model, rank, steps=3 + rank, optimizer=optimizer)
    return weights(model)


@feature
def ddp_with_an_error_at_uneven_inputs(rank: int, size: int) -> Any:
    model = DistributedDataParallel(perceptron())
    try:
        with model.join(throw_on_early_termination=True):
            trained(model, rank, steps=2 + (rank > 0))
    except RuntimeError as error:
        return str(error)


@feature
def ddp_with_a_sharded_optimizer(rank: int, size: int) -> Any:
    model = DistributedDataParallel(perceptron())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, parameters_as_bucket_view=True, lr=0.01)
    found = trained(model, rank, optimizer=optimizer)
    optimizer.consolidate_state_dict(to=0)
    return found


@feature
def ddp_on_a_part_of_the_ranks(rank: int, size: int) -> Any:
    parts = [dist.new_group([each for each in range(size) if each % 2 == part]) for part in range(2)]
    return trained(DistributedDataParallel(perceptron(), process_group=parts[rank % 2]), rank)


@feature
def ddp_of_two_models(rank: int, size: int) -> Any:
    generator, critic = DistributedDataParallel(perceptron()), DistributedDataParallel(nn.Linear(4, 1))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic)]
    for step in range(4):
        critic(generator(batch(rank, step))).sum().backward()
        optimizers[step % 2].step()
    return [*weights(generator), *weights(critic)]


@feature
def ddp_with_loaders(rank: int, size: int) -> Any:
    samples = TensorDataset(torch.arange(64.0).view(8, 8) / 64)
    sampler = DistributedSampler(samples, size, rank)
    model = DistributedDataParallel(perceptron())
    for (inputs,) in DataLoader(samples, 2, sampler=sampler, num_workers=2):
        model(inputs).sum().backward()
        loss = inputs.mean()
        dist.all_reduce(loss, op=dist.ReduceOp.MAX)
    return [each.grad for each in model.parameters()]


@feature
def ddp_compiled(rank: int, size: int) -> Any:
    if rank:
        # Ranks compile at their own pace.
        torch._dynamo.reset()
    return trained(torch.compile(DistributedDataParallel(perceptron()), backend="aot_eager"), rank)


# -- sharded models --------------------------------------------------------------------------------
def sharded(**options: Any) -> nn.Sequential:
    model = perceptron()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


@feature
def fully_sharded(rank: int, size: int) -> Any:
    mesh = mesh_of(size)
    return [trained(sharded(mesh=mesh, reshard_after_forward=each), rank) for each in (True, False)]


@feature
def fully_sharded_to_a_part(rank: int, size: int) -> Any:
    return trained(sharded(mesh=mesh_of(size), reshard_after_forward=size // 2), rank)


@feature
def fully_sharded_and_replicated(rank: int, size: int) -> Any:
    return trained(sharded(mesh=mesh_of(size // 2, 2)), rank)


@feature
def fully_sharded_in_mixed_precision(rank: int, size: int) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return trained(sharded(mesh=mesh_of(size), mp_policy=policy), rank)


@feature
def fully_sharded_that_accumulates(rank: int, size: int) -> Any:
    model = sharded(mesh=mesh_of(size))
    for step in range(4):
        model.set_requires_gradient_sync(step % 2 == 1)
        model(batch(rank, step)).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return [norm.full_tensor(), *(each.grad.full_tensor() for each in model.parameters())]


@feature
def fully_sharded_with_checkpoints(rank: int, size: int) -> Any:
    model = sharded(mesh=mesh_of(size))
    trained(model, rank)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, 0)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder[0])
    other = sharded(mesh=mesh_of(size))
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=folder[0])
    set_model_state_dict(other, state["model"])
    dcp.async_save({"model": get_model_state_dict(other)}, checkpoint_id=f"{folder[0]}/later").result()
    third = sharded(mesh=mesh_of(size))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(third, whole if rank == 0 else {}, options=options)
    return [*weights(other), *weights(third)]


@feature
def wrapped_by_the_first_fsdp(rank: int, size: int) -> Any:
    model = FullyShardedDataParallel(perceptron(), device_id=torch.device("cpu"), use_orig_params=True)
    return trained(model, rank)


# -- distributed tensors ---------------------------------------------------------------------------
@feature
def redistributed_tensors(rank: int, size: int) -> Any:
    mesh = mesh_of(size)
    # Five rows divide among no number of ranks here.
    whole = torch.arange(40.0).view(5, 8)
    placements = [Shard(0), Replicate(), Shard(1), Shard(0), Replicate()]
    found = []
    tensor = distribute_tensor(whole, mesh, [Shard(1)])
    for placement in placements:
        tensor = tensor.redistribute(mesh, [placement])
        found.append(tensor.to_local())
    part = DTensor.from_local(whole * (rank + 1), mesh, [Partial()])
    found += [part.redistribute(mesh, [placement]).to_local() for placement in (Replicate(), Shard(0), Shard(1))]
    product = distribute_tensor(torch.ones(6, 5), mesh, [Shard(0)]) @ distribute_tensor(whole, mesh, [Shard(1)])
    torch.manual_seed(0)
    drawn = torch.distributed.tensor.empty(8, 8, device_mesh=mesh, placements=[Shard(0)]).normal_()
    return [*found, product.full_tensor(), drawn.full_tensor(), product.sum().full_tensor()]


@feature
def tensors_on_a_mesh(rank: int, size: int) -> Any:
    mesh = mesh_of(size // 2, 2)
    tensor = distribute_tensor(torch.arange(64.0).view(8, 8), mesh, [Shard(0), Shard(1)])
    moved = tensor.redistribute(mesh, [Replicate(), Shard(0)])
    return [moved.to_local(), (tensor + moved).full_tensor(), mesh["y"].get_coordinate()]


@feature
def tensor_parallel(rank: int, size: int) -> Any:
    mesh = mesh_of(size)
    model = parallelize_module(perceptron(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return trained(model, 0)


@feature
def pipeline(rank: int, size: int) -> Any:
    found = []
    for schedule_type in (ScheduleGPipe, Schedule1F1B):
        torch.manual_seed(rank)
        layer = nn.Linear(8, 8)
        stage = PipelineStage(layer, rank, size, torch.device("cpu"))
        schedule = schedule_type(stage, 2 * size, loss_fn=nn.functional.mse_loss)
        inputs = torch.arange(64.0 * size).view(8 * size, 8) / 64
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        elif rank == size - 1:
            schedule.step(target=torch.zeros_like(inputs), losses=losses)
        else:
            schedule.step()
        found += [*losses, *(each.grad for each in layer.parameters())]
    return found


# -- collectives -----------------------------------------------------------------------------------
def numbers(rank: int, count: int = 6, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(1, count + 1).to(dtype) * (rank + 1)


@feature
def functional_collectives(rank: int, size: int) -> Any:
    group = dist.group.WORLD
    mine = numbers(rank, 4 * size)
    found = [
        functional.all_reduce(mine, "sum", group),
        functional.all_gather_tensor(mine, 0, group),
        functional.reduce_scatter_tensor(mine, "sum", 0, group),
        functional.all_to_all_single(mine, None, None, group),
        functional.broadcast(mine, 0, group),
        *functional.all_reduce_coalesced([mine, mine + 1], "sum", group),
        *functional.all_gather_into_tensor_coalesced([mine, mine + 1], group),
        *functional.reduce_scatter_tensor_coalesced([mine, mine + 1], "sum", [0, 0], group),
        functional.permute_tensor(mine, [*range(1, size), 0], group),
    ]
    differentiated = mine.clone().requires_grad_()
    functional.all_gather_tensor_autograd(differentiated, 0, group).square().sum().backward()
    return [*map(functional.wait_tensor, found), differentiated.grad]


@feature
def differentiable_collectives(rank: int, size: int) -> Any:
    mine = numbers(rank, 2 * size).requires_grad_()
    results = [
        differentiable.all_reduce(mine),
        differentiable.broadcast(mine, 0),
        *differentiable.all_gather(mine),
        differentiable.reduce_scatter(torch.empty(2), [*mine.view(size, 2)]),
        *differentiable.all_to_all([torch.empty(2) for _ in range(size)], [*mine.view(size, 2)]),
    ]
    sum(each.square().sum() for each in results).backward()
    return [mine.grad, *results]


@feature
def collectives_of_all_types(rank: int, size: int) -> Any:
    found = []
    for dtype in (torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float64):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
            tensor = numbers(rank, dtype=dtype)
            dist.all_reduce(tensor, op)
            found.append(tensor)
    for dtype in (torch.complex64, torch.bool):
        tensor = numbers(rank, dtype=dtype)
        dist.broadcast(tensor, size - 1)
        found.append(tensor)
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        tensor = numbers(rank, dtype=torch.int32)
        dist.all_reduce(tensor, op)
        found.append(tensor)
    sparse = torch.sparse_coo_tensor([[rank, rank + 1]], [1.0, 2.0], (8,))
    dist.all_reduce(sparse)
    return [*found, sparse.to_dense()]


@feature
def coalesced_collectives(rank: int, size: int) -> Any:
    tensors = [numbers(rank, count) for count in (2, 3, 5)]
    dist.all_reduce_coalesced(tensors)
    lists = [[torch.empty_like(each) for each in tensors] for _ in range(size)]
    dist.all_gather_coalesced(lists, tensors)
    return lists


@feature
def coalescing_manager(rank: int, size: int) -> Any:
    tensors = [numbers(rank, count) for count in (2, 3, 5)]
    with dist._coalescing_manager():
        for each in tensors:
            dist.all_reduce(each)
    return tensors


@feature
def asynchronous_calls(rank: int, size: int) -> Any:
    tensors = [numbers(rank, 3 + count) for count in range(8)]
    gathered = [torch.empty(3) for _ in range(size)]
    works = [
        *(dist.all_reduce(each, async_op=True) for each in tensors[:4]),
        *(dist.broadcast(each, size - 1, async_op=True) for each in tensors[4:6]),
        dist.reduce(tensors[6], 0, async_op=True),
        dist.all_gather(gathered, numbers(rank, 3), async_op=True),
        dist.barrier(async_op=True),
    ]
    # Each rank waits in an order of its own.
    for place in torch.randperm(len(works), generator=torch.Generator().manual_seed(rank)).tolist():
        works[place].wait()
    return [*tensors[:6], *tensors[6:] * (rank == 0), gathered]


@feature
def objects(rank: int, size: int) -> Any:
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    collected = [None] * size if rank == 1 else None
    dist.gather_object(("from", rank), collected, dst=1)
    received: list[Any] = [None]
    dist.scatter_object_list(received, [{"to": each} for each in range(size)] if rank == 0 else None, src=0)
    settings = ["settings"] if rank == 1 else [None]
    dist.broadcast_object_list(settings, src=1)
    passed: list[Any] = [None]
    if rank == 0:
        dist.send_object_list([{"hello": 1}], dst=1)
    elif rank == 1:
        dist.recv_object_list(passed, src=0)
    return [gathered, collected, received, settings, passed]


@feature
def messages(rank: int, size: int) -> Any:
    following, previous = (rank + 1) % size, (rank - 1) % size
    arrived = [torch.zeros(6) for _ in range(3)]
    batch_of = [dist.P2POp(dist.isend, numbers(rank), following), dist.P2POp(dist.irecv, arrived[0], previous)]
    for work in dist.batch_isend_irecv(batch_of):
        work.wait()
    works = [dist.isend(numbers(rank) + 1, following, tag=7), dist.irecv(arrived[1], previous, tag=7)]
    dist.all_reduce(numbers(rank))
    for work in works:
        work.wait()
    if rank == 0:
        for _ in range(size - 1):
            dist.recv(arrived[2])
    else:
        dist.send(numbers(1), 0)
    return arrived


@feature
def messages_while_others_gather(rank: int, size: int) -> Any:
    pair = dist.new_group([0, 1])
    found = torch.zeros(6)
    for _ in range(5):
        if rank == 0:
            dist.send(numbers(3), group=pair, dst=1)
        elif rank == 1:
            dist.recv(found, group=pair, src=0)
        dist.all_reduce(numbers(rank))
    return found


@feature
def groups_of_many_kinds(rank: int, size: int) -> Any:
    halves, _ = dist.new_subgroups(size // 2)
    pairs, _ = dist.new_subgroups_by_enumeration([[each, each + 1] for each in range(0, size, 2)])
    # A group that its members alone make.
    mine = [each for each in range(size) if each % 2 == rank % 2]
    local = dist.new_group(mine, use_local_synchronization=True)
    found = []
    for group in (halves, pairs, local):
        tensor = numbers(rank)
        dist.all_reduce(tensor, group=group)
        found.append(tensor)
    dist.destroy_process_group(local)
    if rank > 0:
        dist.barrier(dist.new_group(range(1, size), use_local_synchronization=True))
    return found


@feature
def barriers(rank: int, size: int) -> Any:
    dist.monitored_barrier(timeout=dt.timedelta(seconds=20), wait_all_ranks=True)
    dist.barrier()
    dist.monitored_barrier()
    tensor = numbers(rank)
    dist.all_reduce(tensor)
    return tensor


@feature
def errors_that_all_catch(rank: int, size: int) -> Any:
    found = []
    # Gloo has sums of neither.
    for tensor in (numbers(rank, dtype=torch.int16), torch.ones(4, dtype=torch.bool)):
        try:
            dist.all_reduce(tensor)
        except (RuntimeError, ValueError) as error:
            found.append(type(error).__name__)
    assert found
    tensor = numbers(rank)
    dist.all_reduce(tensor)
    return [*found, tensor]


@feature
def calls_of_threads(rank: int, size: int) -> Any:
    groups = [dist.new_group(range(size)) for _ in range(3)]
    tensors = [numbers(rank) for _ in groups]

    def reduce(place: int) -> None:
        for _ in range(20):
            dist.all_reduce(tensors[place], group=groups[place])

    threads = [threading.Thread(target=reduce, args=(place,)) for place in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tensors


@feature
def empty_tensors(rank: int, size: int) -> Any:
    rows = [0] * size
    out = torch.empty(0)
    dist.all_to_all_single(out, torch.empty(0), rows, rows)
    # Only the first rank has something for the others.
    sends = [3 * (rank == 0)] * size
    receives = [3 * (each == 0) for each in range(size)]
    taken = torch.empty(3, 2)
    dist.all_to_all_single(taken, torch.ones(sum(sends), 2) * rank, receives, sends)
    return [out, taken]


@feature
def default_group_made_again(rank: int, size: int) -> Any:
    store = dist.distributed_c10d._get_default_store()
    found = []
    for again in range(2):
        tensor = numbers(rank)
        dist.all_reduce(tensor)
        found.append(tensor)
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.PrefixStore(f"again {again}", store), rank=rank, world_size=size)
    dist.all_reduce(tensor)
    return [*found, tensor]
