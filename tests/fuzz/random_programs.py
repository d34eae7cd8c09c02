"""Programs that seed, draw and drop out, drawn by a number: what they compute depends on their generators alone."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, random_split

__all__ = ["STEPS", "run"]

ONES = torch.ones(3, 4, 2, 2)
Step = Callable[[], Any]


def gradients(model: nn.Module, *, reentrant: bool | None) -> list[torch.Tensor]:
    """Return gradients that are right only if what is computed again drops out the same."""
    given = torch.ones(4, 6, requires_grad=True)
    out = model(given) if reentrant is None else checkpoint(model, given, use_reentrant=reentrant)
    (out * torch.rand(4, 6)).sum().backward()
    return [given.grad, *(p.grad for p in model.parameters())]


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.3))


def nested(depth: int, given: torch.Tensor) -> torch.Tensor:
    if not depth:
        return nn.functional.dropout(given)
    return checkpoint(functools.partial(nested, depth - 1), given, use_reentrant=True) + nn.functional.dropout(
        given, 0.1
    )


def deep() -> Any:
    given = torch.ones(8, requires_grad=True)
    nested(20, given).sum().backward()
    return given.grad


def forked() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        first = torch.rand(2)
    return first, torch.rand(2)


def again() -> Any:
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    drawn = [(torch.rand(2), random.gauss(), np.random.randn(2)) for _ in range(2)]
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])
    return *drawn, torch.rand(3), random.gauss(), np.random.randn(3)


def in_a_thread() -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append((torch.rand(2), random.random(), np.random.rand())))
    thread.start()
    thread.join()
    return found


def lstm() -> Any:
    model = nn.LSTM(3, 3, 2, dropout=0.5)
    model(torch.ones(4, 2, 3))[0].sum().backward()
    return [p.grad for p in model.parameters()]


def shuffled(values: list[int]) -> list[int]:
    random.shuffle(values)
    return values


def own() -> Any:
    generator = torch.Generator().manual_seed(3)
    return torch.rand(2, generator=generator), torch.randperm(5, generator=generator), torch.rand(1)


# What people write; the operators one by one are in tests/unit/core/test_thread_ranks.py.
STEPS: dict[str, Step] = {
    "rand": lambda: torch.rand(5),
    "randn double": lambda: torch.randn(5, dtype=torch.float64),
    "randn complex": lambda: torch.randn(2, dtype=torch.complex64),
    "randn long": lambda: torch.randn(40),
    "randint": lambda: torch.randint(0, 100, (4,)),
    "rand_like": lambda: torch.rand_like(ONES),
    "randperm": lambda: torch.randperm(9),
    "normal": lambda: torch.normal(torch.zeros(4), 2.0),
    "multinomial": lambda: torch.multinomial(torch.ones(9), 4),
    "bernoulli": lambda: torch.bernoulli(torch.full((9,), 0.5)),
    "poisson": lambda: torch.poisson(torch.full((4,), 3.0)),
    "in place": lambda: [getattr(torch.empty(3), f"{name}_")() for name in ("exponential", "cauchy", "log_normal")],
    "distributions": lambda: [
        torch.distributions.Gamma(2.0, 1.0).sample((2,)),
        torch.distributions.Dirichlet(torch.ones(3)).sample(),
        torch.distributions.Binomial(10, torch.tensor(0.3)).sample((2,)),
        torch.distributions.Categorical(torch.ones(4)).sample((3,)),
    ],
    "default generator": lambda: torch.rand(2, generator=torch.default_generator),
    "own generator": own,
    "layers": lambda: list(nn.Sequential(nn.Linear(3, 4), nn.Conv1d(4, 2, 2), nn.Embedding(5, 2)).parameters()),
    "init": lambda: [nn.init.trunc_normal_(torch.empty(5)), nn.init.orthogonal_(torch.empty(3, 3))],
    "dropout": lambda: nn.functional.dropout(ONES, 0.4),
    "dropout2d": lambda: nn.functional.dropout2d(ONES, 0.5),
    "alpha dropout": lambda: nn.functional.alpha_dropout(ONES, 0.5, True),
    "feature alpha dropout": lambda: nn.functional.feature_alpha_dropout(ONES, 0.5, True),
    "rrelu": lambda: nn.functional.rrelu(-ONES, training=True),
    "rrelu in place": lambda: (
        nn.functional.rrelu(-ONES, training=True, inplace=False) + nn.functional.rrelu_(-ONES.clone(), training=True)
    ),
    "fractional pool": lambda: nn.functional.fractional_max_pool2d(torch.rand(1, 1, 8, 8), 2, output_size=3),
    "attention": lambda: nn.functional.scaled_dot_product_attention(*[ONES] * 3, dropout_p=0.5),
    "gumbel": lambda: nn.functional.gumbel_softmax(ONES[0, 0], hard=True),
    "lstm": lstm,
    "plain": lambda: gradients(dropping(), reentrant=None),
    "checkpoint": lambda: gradients(dropping(), reentrant=False),
    "reentrant checkpoint": lambda: gradients(dropping(), reentrant=True),
    "deep checkpoint": deep,
    "svd": lambda: torch.svd_lowrank(torch.eye(9))[1],
    "loader": lambda: list(DataLoader(torch.arange(8.0), 2, shuffle=True)),
    "split": lambda: random_split(range(10), [4, 6])[0].indices,
    "vmap": lambda: torch.vmap(lambda x: x + torch.rand(2), randomness="different")(torch.zeros(3, 2)),
    "initial seed": torch.initial_seed,
    "fork": forked,
    "state": again,
    "thread": in_a_thread,
    "python": lambda: (random.random(), random.randint(1, 9), random.gauss(), random.choices("abc", k=3)),
    "python sample": lambda: (random.sample(range(50), 4), random.betavariate(2, 3), shuffled([1, 2, 3, 4, 5])),
    "numpy": lambda: (np.random.rand(2), np.random.permutation(5), np.random.normal(), np.random.randint(9)),
}
# Names are looked up each time, as a program does.
SEEDS = [(torch, "manual_seed"), (random, "seed"), (np.random, "seed")]


def run(number: int) -> tuple[list[str], list[Any]]:
    """Run the program of this number, and return its steps and what they computed."""
    drawn = random.Random(number)
    names = []
    results = []
    for owner, name in SEEDS:
        getattr(owner, name)(number)
    for _ in range(drawn.randint(1, 8)):
        if drawn.random() < 0.2:
            owner, name = drawn.choice(SEEDS)
            names.append(f"{owner.__name__}.{name}")
            getattr(owner, name)(drawn.randrange(1000))
        else:
            names.append(drawn.choice(list(STEPS)))
            results.append(plain(STEPS[names[-1]]()))
    return names, results


def plain(value: Any) -> Any:
    """Return a value as Python objects, which compare bit for bit."""
    if isinstance(value, torch.Tensor):
        return value.detach().resolve_conj().view(-1).numpy().tobytes()
    if isinstance(value, np.ndarray):
        return value.tobytes()
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value
