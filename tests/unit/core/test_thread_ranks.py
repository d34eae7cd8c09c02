"""Ranks that are threads have random generators of their own, as processes have."""

from __future__ import annotations

import multiprocessing
import queue
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from random import shuffle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import unisono as un
from unisono.core import thread_ranks
from unisono.core.thread_ranks import ThreadRank, here
from unisono.core.threads import DaemonThreadPool
from unisono.errors import UnavailableError

BACKENDS = ("thread", "sim")
DEFAULT = torch.default_generator


@pytest.fixture
def rank() -> Iterator[ThreadRank]:
    """This thread, as a rank."""
    rank = ThreadRank()
    with rank:
        yield rank


def rank_like(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# -- every operator ----------------------------------------------------------------------------------
# Their kernels are for other devices, and these names have no generator, or one that is passed on to those.
ELSEWHERE = (
    "_cudnn", "_efficient_attention", "_fill_mem_eff", "_flash_attention", "_fused_dropout", "_lstm_mps", "miopen_rnn",
    "_scaled_dot_product_attention_math_for_mps", "_scaled_dot_product_cudnn", "_scaled_dot_product_efficient",
    "_scaled_dot_product_flash_attention.", "_scaled_dot_product_fused", "_triton",
)  # fmt: skip
# They are tagged, and draw nothing on the CPU: one refuses dropout there, one chooses, one is a plain softmax.
DRAWS_NOTHING = (
    "_scaled_dot_product_flash_attention_for_cpu.default",
    "_fused_sdp_choice.default",
    "_nested_tensor_softmax_with_shape.default",
)
HALVES = torch.full((4, 4), 0.5)
ARGUMENTS: dict[str, Any] = {
    "size": [40], "n": 40, "high": 90, "low": 0, "from": 0, "to": 90, "p": 0.5, "num_samples": 2,
    "mean": 0.0, "std": 2.0, "train": True, "training": True, "dropout": 0.5, "dropout_p": 0.5,
    "num_layers": 2, "has_biases": True, "bidirectional": False, "batch_first": False, "total_length": 4, "lambd": 1.0,
    "input": torch.ones(4, 4, 4),
    "query": torch.ones(1, 2, 4, 4), "key": torch.ones(1, 2, 4, 4), "value": torch.ones(1, 2, 4, 4),
    "data": torch.ones(4, 4), "batch_sizes": torch.tensor([1] * 4),
    "count": torch.full((4, 4), 9.0), "prob": HALVES,
}  # fmt: skip


def arguments_of(operator: Any) -> dict[str, Any]:
    """Return arguments with which an operator draws numbers on the CPU; it is given no generator."""
    name = operator.name().removeprefix("aten::")
    found: dict[str, Any] = {}
    for argument in operator._schema.arguments:
        value = ARGUMENTS.get(argument.name)
        if argument.name == "generator" or (value is None and argument.has_default_value()):
            value = argument.default_value
        elif name.startswith(("lstm", "gru", "rnn")) and argument.name in ("hx", "params"):
            value = recurrent(name, argument.name)
        elif argument.name in ("self", "noise"):
            # Negative for what is random there.
            value = -HALVES if "rrelu" in name else HALVES.clone()
        elif argument.is_out or (argument.alias_info is not None and argument.alias_info.is_write):
            integers = any(word in name for word in ("randint", "randperm", "multinomial"))
            dtype = torch.bool if argument.name == "out1" else torch.int64 if integers else torch.float32
            value = torch.empty((4, 4, 4) if "dropout" in name else (4, 4), dtype=dtype)
        elif str(argument.type) == "Tensor" and not isinstance(value, torch.Tensor):
            value = torch.tensor(90) if argument.name == "high" else HALVES
        found[argument.name] = value
    return found


def recurrent(name: str, argument: str) -> Any:
    kind, _, form = name.partition(".")
    model = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN, "rnn_relu": nn.RNN}[kind](4, 4, 2)
    if argument == "params":
        return [parameter.detach() for parameter in model.parameters()]
    state = torch.zeros(2, 4, 4) if form == "input" else torch.zeros(2, 1, 4)
    return [state, state] if kind == "lstm" else state


def all_operators() -> list[Any]:
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        base, _, overload = name.removeprefix("aten::").partition(".")
        if name.startswith("aten::"):
            operator = getattr(getattr(torch.ops.aten, base), overload or "default")
            takes = any(argument.name == "generator" for argument in operator._schema.arguments)
            if takes or torch.Tag.nondeterministic_seeded in operator.tags:
                found.append(operator)
    return found


def draw(operator: Any) -> list[torch.Tensor]:
    torch.manual_seed(3)
    found = operator(**arguments_of(operator))
    return [one.clone() for one in ([found] if isinstance(found, torch.Tensor) else found)]


def test_every_operator_draws_from_the_generator_of_its_rank(rank: ThreadRank) -> None:
    before = DEFAULT.get_state()
    drawn = 0
    for operator in all_operators():
        name = str(operator).removeprefix("aten.")
        if name.startswith(ELSEWHERE) or name in DRAWS_NOTHING:
            continue
        first, second = draw(operator), draw(operator)
        assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True)), name
        assert not torch.equal(rank.torch.get_state(), torch.Generator().manual_seed(3).get_state()), name
        drawn += 1
    assert torch.equal(DEFAULT.get_state(), before)
    assert drawn > 100


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_sparse_tensors_draw_from_the_generator_of_the_rank(rank: ThreadRank) -> None:
    sparse = torch.eye(4).to_sparse_csr()
    assert torch.equal(sparse.clone().normal_(generator=rank_like(3)).values(), torch.randn(4, generator=rank_like(3)))
    torch.manual_seed(3)
    assert torch.equal(sparse.normal_().values(), torch.randn(4, generator=rank_like(3)))


def test_other_threads_run_while_an_operator_draws(rank: ThreadRank) -> None:
    big = torch.empty(10_000_000)
    turns = []
    drawing = threading.Thread(target=big.normal_)
    drawing.start()
    while drawing.is_alive():
        turns.append(drawing.join(0.001))
    assert len(turns) > 4


# -- ranks of a launch -------------------------------------------------------------------------------
def weights(comm: un.Communicator | None = None) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("backend", BACKENDS)
def test_model_is_that_of_its_seed(backend: str) -> None:
    with torch.random.fork_rng(devices=[]):
        right = weights()
    for _ in range(5):
        assert all(torch.equal(found, right) for found in un.launch(weights, 4, backend))


def drawn(comm: un.Communicator | None = None) -> tuple[float, float, float]:
    return torch.rand(1).item(), random.random(), np.random.rand()


def test_ranks_without_a_seed_draw_other_numbers() -> None:
    found = un.launch(drawn, 3, "thread") + un.launch(drawn, 3, "thread")
    assert len({number for rank in found for number in rank}) == 18


@pytest.mark.parametrize("backend", BACKENDS)
def test_everything_is_as_before_after_the_last_rank(backend: str) -> None:
    state = un.checkpoint.RNG().state_dict()
    names = [(torch, "default_generator"), (random, "seed"), (np.random, "rand"), (threading.Thread, "start")]
    before = [getattr(owner, name) for owner, name in names]
    un.launch(lambda comm: (drawn(), random.seed(1), np.random.seed(1)), 2, backend)
    assert [getattr(owner, name) for owner, name in names] == before
    assert type(random._inst) is random.Random  # type: ignore[attr-defined]
    assert "thread_ranks" not in torch._C._dispatch_dump("aten::normal_")
    after = un.checkpoint.RNG().state_dict()
    assert torch.equal(after["torch"], state["torch"])
    assert after["python"] == state["python"]
    assert np.array_equal(after["numpy"]["state"]["key"], state["numpy"]["state"]["key"])


def test_generators_remain_until_the_last_rank_ends() -> None:
    """One that is left behind after another one's failure, say."""
    rank = ThreadRank(1)
    with rank:
        with pytest.raises(KeyError):
            un.launch(lambda comm: {}[0], 2, "thread")
        first = drawn()
    with ThreadRank(1):
        assert drawn() == first


def test_ranks_that_do_not_ask_share_nothing_with_those_that_launch() -> None:
    """The thread that has launched them draws from the generator of the process, meanwhile."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        right = torch.rand(3), torch.rand(3)
        torch.manual_seed(7)
        found = [torch.rand(3)]

        def program(comm: un.Communicator) -> None:
            if comm.rank == 0:
                torch.manual_seed(9)
                driver.submit(lambda: found.append(torch.rand(3))).result()

        with ThreadPoolExecutor(1) as driver:
            driver.submit(int).result()
            un.launch(program, 2, "thread")
    assert all(map(torch.equal, found, right))


# -- what the program holds --------------------------------------------------------------------------
def test_default_generator_is_that_of_the_rank(rank: ThreadRank) -> None:
    right = torch.rand(3, generator=torch.Generator().manual_seed(4))
    for generator in (torch.default_generator, torch.random.default_generator):
        assert isinstance(generator, torch.Generator)
        generator.manual_seed(4)
        assert torch.initial_seed() == generator.initial_seed() == 4
        assert torch.equal(torch.rand(3, generator=generator), right)
    # The object that a program imported before there were ranks, such as the default of `random_split`.
    torch.manual_seed(4)
    assert torch.equal(torch.rand(3, generator=DEFAULT), right)
    torch.manual_seed(4)
    assert torch.equal(torch.poisson(torch.ones(3), DEFAULT), torch.poisson(torch.ones(3), rank_like(4)))


def test_own_generator_of_a_program_is_its_own(rank: ThreadRank) -> None:
    before = rank.torch.get_state()
    assert torch.equal(torch.rand(3, generator=rank_like(1)), torch.rand(3, generator=rank_like(1)))
    assert torch.equal(torch.poisson(torch.ones(9), rank_like(1)), torch.poisson(torch.ones(9), rank_like(1)))
    assert torch.equal(rank.torch.get_state(), before)


def test_names_that_were_imported_earlier_draw_from_the_generator_of_the_rank(rank: ThreadRank) -> None:
    def found() -> list[Any]:
        random.seed(5)
        np.random.seed(5)
        values = list(range(9))
        shuffle(values)
        return [*values, GAUSS(0, 1), GAUSS(0, 1), random.gauss(0, 1), np.random.mtrand._rand.rand(), SEED(5)]

    assert found() == found()
    # Scikit-learn and scipy take it where they are given no generator, and look at its class.
    assert isinstance(np.random.mtrand._rand, np.random.RandomState)
    assert np.random.mtrand._rand.rand() == np.random.RandomState(5).rand()


GAUSS = random.gauss
SEED = np.random.seed


# -- threads and processes of a rank -----------------------------------------------------------------
@pytest.mark.parametrize("backend", BACKENDS)
def test_threads_of_a_rank_belong_to_it(backend: str) -> None:
    def program(comm: un.Communicator) -> bool:
        found = []
        thread = threading.Thread(target=lambda: found.append(here()))
        thread.start()
        thread.join()
        return found == [here()]

    assert un.launch(program, 3, backend) == [True] * 3


def test_tasks_of_a_shared_thread_belong_to_the_rank_that_each_is_for() -> None:
    pool = DaemonThreadPool("shared")
    turns = threading.Semaphore(1)

    def program(comm: un.Communicator) -> bool:
        found: queue.SimpleQueue[ThreadRank | None] = queue.SimpleQueue()
        with turns:
            pool.run(lambda: found.put(here()))
            return found.get() is here()

    assert un.launch(program, 3, "thread") == [True] * 3


class Draws(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([torch.rand(1), torch.tensor([random.random(), np.random.rand()])])


def loaded() -> torch.Tensor:
    torch.manual_seed(3)
    return torch.stack(list(DataLoader(Draws(), batch_size=None, num_workers=1, multiprocessing_context="fork")))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_workers_of_a_loader_draw_as_in_a_process() -> None:
    with torch.random.fork_rng(devices=[]):
        right = loaded()
    assert all(torch.equal(found, right) for found in un.launch(lambda comm: loaded(), 2, "thread"))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_process_of_a_rank_has_another_seed_of_python() -> None:
    context = multiprocessing.get_context("fork")

    def program(comm: un.Communicator) -> set[float]:
        random.seed(1)
        answers = context.SimpleQueue()
        children = [context.Process(target=lambda: answers.put(random.random())) for _ in range(2)]
        for child in children:
            child.start()
        found = {answers.get() for _ in children}
        for child in children:
            child.join()
        return found

    assert len(un.launch(program, 1, "thread")[0]) == 2


class Wanted:
    """A lock that reports when somebody waits for it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.wanted = threading.Event()

    def acquire(self) -> None:
        self.wanted.set()
        self.lock.acquire()

    def release(self) -> None:
        self.lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_process_of_a_rank_can_seed_while_another_rank_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Wanted()
    monkeypatch.setattr(torch.cuda, "_initialization_lock", held)

    def program(comm: un.Communicator) -> int | None:
        if comm.rank == 0:
            with held:
                held.wanted.clear()
                comm.barrier()
                # Unless the fork waits for the lock, it happens while this rank holds it.
                held.wanted.wait(5)
            return 0
        comm.barrier()
        child = multiprocessing.get_context("fork").Process(target=torch.manual_seed, args=(1,))
        child.start()
        child.join(20)
        child.kill()
        child.join()
        return child.exitcode

    assert un.launch(program, 2, "thread") == [0, 0]


# -- what torch runs elsewhere -----------------------------------------------------------------------
def test_backward_drops_out_what_forward_did(rank: ThreadRank) -> None:
    model = nn.Dropout(0.5)
    given = torch.ones(1000, requires_grad=True)
    for reentrant in (True, False):
        given.grad = None
        out = checkpoint(model, given, use_reentrant=reentrant)
        torch.rand(3)
        out.sum().backward()
        assert given.grad is not None
        assert torch.equal(given.grad, out.detach())


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_code_draws_on_ranks_as_in_a_process(backend: str) -> None:
    def program(comm: un.Communicator | None = None) -> list[torch.Tensor]:
        torch.manual_seed(2)
        compiled = torch.compile(nn.Sequential(nn.Linear(40, 40), nn.Dropout(0.5)), backend=backend)
        given = torch.ones(9, 40, requires_grad=True)
        out = [compiled(given) for _ in range(2)]
        sum(out).sum().backward()
        return [*out, given.grad, torch.rand(3)]

    with torch.random.fork_rng(devices=[]):
        right = program()
    # One after the other: the compiler is shared.
    for _ in range(2):
        assert all(map(torch.equal, un.launch(program, 1, "thread")[0], right))


# -- a torch that lacks what this needs --------------------------------------------------------------
SEEDS: list[Callable[[], object]] = [
    lambda: torch.manual_seed(0),
    torch.seed,
    lambda: torch.set_rng_state(torch.get_rng_state()),
    lambda: torch.default_generator.manual_seed(0),
]


@pytest.mark.parametrize("seed", SEEDS)
def test_seed_of_all_ranks_is_refused(seed: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_ranks, "OWN_GENERATORS", False)
    for run in (un.testing.torch_ranks(2).run, lambda program: un.launch(lambda comm: program(), 2, "thread")):
        with pytest.raises(UnavailableError, match=r"sets one generator for all ranks, which are threads.*processes"):
            run(seed)
    assert (
        un.launch(lambda comm: random.seed(comm.rank) or random.random(), 2, "thread")[1] == random.Random(1).random()
    )
    seed()
