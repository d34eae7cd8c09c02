"""Sharding inside a host, and copies between hosts: the numbers of full sharding, with fewer bytes between hosts."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from pairwise import short
from sharded_models import batch, loss_of, made, trained
from torch import nn
from torch.optim import AdamW

import unisono as un
from unisono.core.transport import Transport
from unisono.core.types import Message, Send, Work
from unisono.errors import AbortedError, MismatchError, PeerLostError
from unisono.sharding import ShardedModel, ShardedOptimizer
from unisono.testing import run_ranks
from unisono.wrappers.base import Wrapper

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
State = dict[str, torch.Tensor]
MADE = {name: made(name) for name in ("odd", "small", "transformer")}


def copy_of(name: str) -> nn.Module:
    """Return a model that is the same on all ranks: those that are threads share torch's generator."""
    return copy.deepcopy(MADE[name])


def mesh_of(comm: un.Communicator, shards: int) -> tuple[un.Communicator, un.Communicator]:
    """Return (replicate, shard), with shard groups of consecutive ranks."""
    shard = comm.split(comm.rank // shards)
    replicate = comm.split(comm.rank % shards)
    return replicate, shard


def make(comm: un.Communicator, model: nn.Module, stage: int, mesh: Any, **options: Any) -> tuple[Any, Any]:
    """Return who clips, and the optimizer."""
    # To try the class takes as long as all else here.
    options |= {"lr": 0.01, "eps": 1e-3, "elementwise": True}
    if stage == 3:
        sharded = ShardedModel(model, comm, mesh=mesh)
        return sharded, sharded.optimizer(AdamW, **options)
    if stage == 1:
        un.GradientAverager(model, comm)
    optimizer = ShardedOptimizer(
        AdamW, model, comm, mesh=mesh, shard_gradients=stage == 2, bucket_cap_mb=1e-3, **options
    )
    return optimizer, optimizer


def train(comm: un.Communicator, stage: int, shards: int | None, *, clip: bool = False, name: str = "odd") -> State:
    model = copy_of(name)
    owner, optimizer = make(comm, model, stage, None if shards is None else mesh_of(comm, shards))
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, batch(comm.rank, step)).backward()
        if clip:
            owner.clip_grad_norm_(0.5)
        optimizer.step()
    if stage == 3:
        with owner.full_parameters(writeback=False):
            return {name: p.detach().clone() for name, p in model.named_parameters()}
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def equal(one: State, two: State) -> bool:
    return all(torch.equal(one[name], two[name]) for name in one)


@short("backend, stage", product(["thread", "shm"], [1, 2, 3]), [("thread", 1), ("shm", 2), ("thread", 3)])
def test_two_times_two_ranks_have_the_bits_of_four(backend: str, stage: int) -> None:
    def program(comm: un.Communicator) -> bool:
        exact = comm.dup(deterministic=True)
        return equal(train(exact, stage, 2), train(exact, stage, None))

    assert un.launch(program, 4, backend, timeout=60) == [True] * 4


@short(
    "stage, ranks, shards",
    [(stage, *mesh) for stage in (1, 2, 3) for mesh in ((4, 2), (6, 3))],
    [(3, 4, 2)],
)
def test_a_mesh_trains_as_full_sharding_does(stage: int, ranks: int, shards: int) -> None:
    def program(comm: un.Communicator) -> None:
        on_mesh, whole = train(comm, stage, shards), train(comm, stage, None)
        for name, value in on_mesh.items():
            assert value.dtype == torch.float64
            torch.testing.assert_close(value, whole[name], rtol=1e-12, atol=1e-12)

    run_ranks(program, ranks, "thread")


@short(
    "stage, ranks, shards",
    [(stage, *mesh) for stage in (1, 2, 3) for mesh in ((4, 2), (4, 1), (4, 4), (6, 3))],
    [(1, 6, 3), (2, 4, 4), (3, 4, 2)],
)
def test_a_mesh_trains_as_one_process_does(stage: int, ranks: int, shards: int) -> None:
    def program(comm: un.Communicator) -> State:
        return train(comm, stage, shards, clip=True, name="transformer")

    _, wanted = trained("transformer", ranks, steps=2)
    found = un.launch(program, ranks, "thread", timeout=60)
    for state in found:
        assert equal(state, found[0])
        for name, value in state.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reduced_precision_and_accumulation_are_those_of_four_ranks(dtype: torch.dtype) -> None:
    def run(comm: un.Communicator, mesh: Any) -> torch.Tensor:
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
        generator = torch.Generator().manual_seed(0)
        for p in model.parameters():
            p.data = torch.randn(p.shape, generator=generator)
        sharded = ShardedModel(model, comm, mesh=mesh, reduce_dtype=dtype)
        optimizer = sharded.optimizer(AdamW, lr=0.01, elementwise=True)
        with sharded.no_sync():
            model(torch.full((2, 3), 1.0 + comm.rank)).square().mean().backward()
        for _ in range(2):
            model(torch.full((2, 3), 2.0 + comm.rank)).square().mean().backward()
        norm = sharded.clip_grad_norm_(1e9)
        optimizer.step()
        with sharded.full_parameters(writeback=False):
            return torch.cat([norm.reshape(1), *(p.detach().flatten() for p in model.parameters())])

    def program(comm: un.Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        return run(comm, mesh_of(comm, 2)), run(comm, None)

    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    for mine, whole in un.launch(program, 4, "thread", timeout=60):
        torch.testing.assert_close(mine, whole, rtol=tolerance, atol=tolerance)


class Counted(Wrapper):
    """Counts the bytes that each rank sends to each other one, in all groups, by their numbers in the job."""

    def __init__(self, inner: Transport, sent: Counter[tuple[int, int]]) -> None:
        super().__init__(inner)
        self.sent = sent

    def wrap_child(self, inner: Transport) -> Counted:
        return Counted(inner, self.sent)

    def post(self, batch: Sequence[Message]) -> Work:
        members = self.group.members
        for message in batch:
            if isinstance(message, Send):
                self.sent[members[self.group.rank], members[message.peer]] += message.tensor.nbytes
        return super().post(batch)


def bytes_between(stage: int, shards: int | None, width: int) -> list[int]:
    """Return the bytes that each of four ranks on two hosts sends to the other host in a step."""
    sent: Counter[tuple[int, int]] = Counter()

    def between(comm: un.Communicator) -> int:
        return sum(n for (src, dst), n in sent.items() if src == comm.rank and src // 2 != dst // 2)

    def program(comm: un.Communicator) -> int:
        model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)).double()
        _, optimizer = make(comm, model, stage, None if shards is None else mesh_of(comm, shards))
        counts = []
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, width, dtype=torch.float64)).sum().backward()
            optimizer.step()
            counts.append(between(comm))
        return counts[1] - counts[0]

    found: list[int] = run_ranks(program, 4, wrap=lambda inner: Counted(inner, sent))
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_a_mesh_sends_the_gradients_of_a_part_between_hosts_and_little_else(stage: int) -> None:
    width = 64
    part = 2 * width * (width + 1) * 8 // 2
    mesh = bytes_between(stage, 2, width)
    # An all_reduce of two ranks: each sends 2 (r - 1) / r = 1 part. A few hundred bytes are of checks by all ranks.
    assert all(part <= sent <= part + 4096 for sent in mesh)
    assert 1.3 * sum(mesh) < sum(bytes_between(stage, None, width))


def test_a_checkpoint_of_a_mesh_loads_on_any_ranks(tmp_path: Path) -> None:
    def save(comm: un.Communicator) -> State:
        model = copy_of("transformer")
        sharded, optimizer = make(comm, model, 3, mesh_of(comm, 2))
        loss_of(model, batch(comm.rank, 0)).backward()
        optimizer.step()
        un.checkpoint.save(tmp_path, {"model": sharded, "optimizer": optimizer}, comm)
        with sharded.full_parameters(writeback=False):
            return {name: p.detach().clone() for name, p in model.named_parameters()}

    def load(comm: un.Communicator, shards: int | None) -> State:
        model = copy_of("transformer")
        sharded, optimizer = make(comm, model, 3, None if shards is None else mesh_of(comm, shards))
        un.checkpoint.load(tmp_path, {"model": sharded, "optimizer": optimizer}, comm)
        loss_of(model, batch(0, 1)).backward()
        optimizer.step()
        with sharded.full_parameters(writeback=False):
            return {name: p.detach().clone() for name, p in model.named_parameters()}

    saved = un.launch(save, 4, "thread", timeout=60)[0]
    plain = copy_of("transformer")
    optimizer = AdamW(plain.parameters(), lr=0.01, eps=1e-3)
    un.checkpoint.load(tmp_path, {"model": plain, "optimizer": optimizer})
    assert equal(saved, dict(plain.named_parameters()))
    loss_of(plain, batch(0, 1)).backward()
    optimizer.step()
    for ranks, shards in ((3, None), (4, 2), (2, 1)):
        for state in un.launch(load, ranks, "thread", (shards,), timeout=60):
            for name, p in plain.named_parameters():
                torch.testing.assert_close(state[name], p.detach(), rtol=1e-9, atol=1e-12)


def test_zero_1_and_2_on_a_mesh_resume_from_a_checkpoint_with_masters(tmp_path: Path) -> None:
    def program(comm: un.Communicator, shards: int | None, load: bool) -> list[float]:
        model = copy_of("small").to(torch.bfloat16)
        mesh = None if shards is None else mesh_of(comm, shards)
        _, optimizer = make(comm, model, 2, mesh, master_dtype=torch.float32)
        if load:
            un.checkpoint.load(tmp_path, {"model": model, "optimizer": optimizer}, comm)
        loss_of(model, batch(0, int(load))).backward()
        optimizer.step()
        if not load:
            un.checkpoint.save(tmp_path, {"model": model, "optimizer": optimizer}, comm)
        return [p.float().sum().item() for p in model.parameters()]

    un.launch(program, 4, "thread", (2, False))
    on_mesh = un.launch(program, 4, "thread", (2, True))
    assert on_mesh == un.launch(program, 2, "thread", (None, True)) * 2


def test_a_model_moves_from_a_mesh_to_other_ranks() -> None:
    def program(comm: un.Communicator) -> list[float]:
        model = nn.Linear(3, 1)
        sharded = ShardedModel(model, comm, mesh=mesh_of(comm, 2))
        state = {name: torch.ones(p.shape) for name, p in model.named_parameters()}
        found = []
        for mesh in (None, mesh_of(comm, 1), mesh_of(comm, 4)):
            sharded.move_to(comm, mesh)
            sharded.load_state_dict(state)
            found.append(model(torch.ones(1, 3)).item())
        return found

    assert un.launch(program, 4, "thread", timeout=60) == [[4.0] * 3] * 4


# -- errors ---------------------------------------------------------------------------------------------
def crossed(comm: un.Communicator) -> Any:
    """Return groups of two and two ranks that are no rows and columns."""
    return comm.split(comm.rank // 2), comm.split(comm.rank // 2, key=-comm.rank)


def of_other_ranks(comm: un.Communicator) -> Any:
    """Return groups with the right sizes, of which this rank's are not of the ranks of `comm`."""
    shard = comm.split([0, 1, 0, 1][comm.rank], key=[0, 0, 1, 1][comm.rank])
    return comm.split([0, 0, 1, 1][comm.rank], key=[0, 1, 1, 0][comm.rank]), shard


WRONG = {
    "sizes": (lambda comm: (comm, comm), r"4 x 4 ranks .*, and comm has 4 ranks"),
    "neither": (
        lambda comm: (comm.split(0 if comm.rank < 2 else None), comm.split(0 if comm.rank < 2 else None)),
        r"mesh is \(NoneType, NoneType\) on rank 2",
    ),
    "one": (lambda comm: comm, "mesh is Communicator|mesh is \\(Communicator\\)"),
    "crossed": (crossed, "ranks 0 and 2 have the same place"),
    "other ranks": (of_other_ranks, "have the same (place|rank)"),
}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_mesh_is_refused_on_every_rank(wrong: str, stage: int) -> None:
    def program(comm: un.Communicator) -> list[float]:
        mesh, words = WRONG[wrong]
        model = nn.Linear(2, 1)
        nn.init.constant_(model.weight, comm.rank)
        given = mesh(comm)
        with pytest.raises(ValueError, match=words):
            make(comm, model, stage, given)
        comm.barrier()
        return model.weight.flatten().tolist()

    assert un.launch(program, 4, "thread", timeout=20) == [[float(rank)] * 2 for rank in range(4)]


def test_a_mesh_of_a_part_of_other_ranks_is_refused() -> None:
    def program(comm: un.Communicator) -> None:
        mesh = mesh_of(comm, 2)
        half = comm.split(comm.rank % 2, key=comm.rank)
        with pytest.raises(ValueError, match="2 x 2 ranks on rank 0, and comm has 2 ranks"):
            ShardedModel(nn.Linear(2, 1), half, mesh=mesh)

    un.launch(program, 4, "thread", timeout=20)


def test_a_mesh_on_some_ranks_only_is_refused() -> None:
    def program(comm: un.Communicator) -> None:
        mesh = mesh_of(comm, 2)
        with pytest.raises(MismatchError, match="rank 3 passed no mesh, and rank 0 did"):
            ShardedModel(nn.Linear(2, 1), comm, mesh=None if comm.rank == 3 else mesh)

    un.launch(program, 4, "thread", timeout=20)


# -- failures -------------------------------------------------------------------------------------------
@short("backend, stage", product(["thread", "sim"], [1, 2, 3]), [("thread", 1), ("sim", 2), ("thread", 3)])
def test_a_lost_rank_is_named_by_its_number_on_all_ranks(backend: str, stage: int) -> None:
    def program(comm: un.Communicator) -> str:
        model = copy_of("transformer")
        _, optimizer = make(comm, model, stage, mesh_of(comm, 2))

        def step() -> None:
            loss_of(model, batch(comm.rank, 0)).backward()
            optimizer.step()

        step()
        if comm.rank == 3:
            raise KeyError("this rank is gone")
        with pytest.raises((PeerLostError, AbortedError)) as caught:
            step()
        return str(caught.value)

    ends = un.launch(program, 4, backend, timeout=20, on_failure="continue")
    assert isinstance(ends[3], KeyError)
    for text in ends[:3]:
        assert "rank 3" in str(text), text


@short("seed, stage", product(range(3), [2, 3]), [(0, 2)])
def test_a_step_after_a_failed_one_is_right(stage: int, seed: int) -> None:
    def program(comm: un.Communicator) -> State:
        model = copy_of("transformer")
        _, optimizer = make(comm, model, stage, mesh_of(comm, 2))

        def fail(_: torch.Tensor) -> None:
            raise KeyError("sample")

        handle = model.blocks[0].register_forward_hook(
            lambda _m, _x, out: out.register_hook(fail) and None if comm.rank == 1 else None
        )

        def step() -> None:
            optimizer.zero_grad()
            loss_of(model, batch(comm.rank, 0)).backward()
            optimizer.step()

        with pytest.raises(KeyError if comm.rank == 1 else AbortedError):
            step()
        handle.remove()
        step()
        return {name: value.local for name, value in optimizer.state_dict()["state"][0].items() if name != "step"}

    def right(comm: un.Communicator) -> State:
        model = copy_of("transformer")
        _, optimizer = make(comm, model, stage, mesh_of(comm, 2))
        loss_of(model, batch(comm.rank, 0)).backward()
        optimizer.step()
        return {name: value.local for name, value in optimizer.state_dict()["state"][0].items() if name != "step"}

    found = un.launch(program, 4, "sim", seed=seed)
    wanted = un.launch(right, 4, "sim", seed=seed)
    assert all(equal(one, two) for one, two in zip(found, wanted, strict=True))


@short("seed", [(0,), (1,), (2,)], [(0,)])
def test_a_pass_without_averaging_that_fails_elsewhere_is_an_error_in_other_groups(seed: int) -> None:
    def program(comm: un.Communicator) -> torch.Tensor:
        model = copy_of("transformer")
        owner, optimizer = make(comm, model, 3, mesh_of(comm, 2))
        failing = [False]

        def fail(*_: Any) -> None:
            handle.remove()
            raise KeyError("sample")

        handle = model.blocks[0].register_forward_pre_hook(lambda *_: fail() if failing[0] else None)

        def step() -> None:
            optimizer.zero_grad()
            with owner.no_sync():
                loss_of(model, batch(comm.rank, 0)).backward()
                if comm.rank == 2 and not failing[0]:
                    failing[0] = True
                    model(batch(comm.rank, 0))
            loss_of(model, batch(comm.rank, 1)).backward()

        with pytest.raises(KeyError if comm.rank == 2 else AbortedError):
            step()
        step()
        return owner.clip_grad_norm_(1e9)

    first, *others = un.launch(program, 4, "sim", seed=seed)
    plain = copy_of("transformer")
    for rank in range(4):
        for number in range(2):
            (loss_of(plain, batch(rank, number)) / 4).backward()
    wanted = nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    torch.testing.assert_close(first, wanted, rtol=1e-9, atol=0)
    assert all(torch.equal(first, other) for other in others)
