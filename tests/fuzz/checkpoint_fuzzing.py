"""Random states, saved by several writers at once that may die, and loaded: equal to what one saved, or an error.

An error leaves the state that was to be filled as it was before, to the last bit.

    python tests/fuzz/checkpoint_fuzzing.py FOLDER FIRST COUNT      # rounds by their seeds
"""

from __future__ import annotations

import collections
import copy
import enum
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import unisono as un
from unisono.checkpoint import CheckpointError
from unisono.errors import CommError

CALLS = ("open", "write", "fsync", "replace", "unlink", "mkdir", "rmdir", "scandir")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.complex64)
REFUSALS = (CheckpointError, CommError, ValueError, TypeError, OSError)


class Color(enum.Enum):
    RED = 1
    BLUE = "blue"


class Flags(enum.Flag):
    A = 1
    B = 2


class Point(NamedTuple):
    x: Any
    y: Any


class Growing(nn.Module):
    """Its buffer takes the size of the loaded one."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.register_buffer("seen", torch.full((chance.randrange(5),), chance.random()))

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if prefix + "seen" in state:
            self.seen = torch.empty_like(state[prefix + "seen"])
        super()._load_from_state_dict(state, prefix, *rest)


class Renamed(nn.Module):
    """Once had its weight under another name."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.name = chance.choice(["weight", "weight", "kernel"])
        self.register_parameter(self.name, nn.Parameter(torch.full((2, 2), chance.random())))
        self.register_load_state_dict_pre_hook(self._rename)

    def _rename(self, module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        for other in {"weight", "kernel"} - {self.name}:
            if prefix + other in state:
                state[prefix + self.name] = state.pop(prefix + other)


class Extra(nn.Module):
    """Its extra state has any size, and may be refused."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), chance.random()))
        self.extra: Any = chance.choice([None, {"sizes": (1, chance.randrange(9))}, [torch.tensor(chance.random())]])
        self.refuses = chance.random() < 0.05

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        if self.refuses:
            raise RuntimeError("refused")
        self.extra = state


class Counter:
    """An object with a state of odd types."""

    def __init__(self, chance: random.Random) -> None:
        self.kept = plain(chance, 2)
        self.refuses = chance.random() < 0.05

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.refuses:
            raise RuntimeError("refused")
        self.kept = state["kept"]


# -- states --------------------------------------------------------------------------------------
def tensor(shape: random.Random, chance: random.Random) -> torch.Tensor:
    """A tensor whose dtype, size and strides depend on `shape` alone, and its values on `chance`."""
    sizes = [shape.randrange(4) for _ in range(shape.randrange(3))]
    dtype, layout = shape.choice(DTYPES), shape.randrange(3)
    values = torch.randint(0, 2 if dtype is torch.bool else 100, sizes, generator=generator(chance)).to(dtype)
    if layout == 1:
        return values.t() if values.dim() == 2 else values
    return torch.stack([values, values], -1)[..., 0] if layout == 2 else values


def generator(chance: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(chance.randrange(1 << 30))


def plain(chance: random.Random, depth: int) -> Any:
    """A value of plain and odd types."""
    if depth and chance.random() < 0.6:
        items = [plain(chance, depth - 1) for _ in range(chance.randrange(3))]
        made = collections.defaultdict(list, {f"k{n}": item for n, item in enumerate(items)})
        containers: list[Callable[[], Any]] = [
            lambda: items,
            lambda: tuple(items),
            lambda: Point(items, depth),
            lambda: dict(enumerate(items)),
            lambda: collections.OrderedDict((f"o{n}", item) for n, item in enumerate(items)),
            lambda: made,
        ]
        return chance.choice(containers)()
    values = [
        None, True, chance.randrange(1 << 70), chance.random(), float("inf"), "text \u00fc", b"\0bytes", 2 - 3j,
        Color.BLUE, Flags.A | Flags.B, torch.float16, range(3), torch.tensor([chance.random()]), frozenset({1, "a"}),
    ]  # fmt: skip
    return chance.choice(values)


def model(shape: random.Random, chance: random.Random) -> nn.Module:
    kinds: list[Callable[[], nn.Module]] = [
        lambda: nn.Linear(2, 3),
        lambda: nn.BatchNorm1d(3),
        lambda: Growing(chance),
        lambda: Renamed(chance),
        lambda: Extra(chance),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
        lambda: nn.Embedding(3, 2),
    ]
    parts = [shape.choice(kinds)() for _ in range(shape.randrange(1, 5))]
    made = nn.Sequential(*parts, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    if shape.random() < 0.3:
        made[-1][1].weight = made[-1][0].weight
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator(chance)))
    return made


def optimizer(shape: random.Random, made: nn.Module) -> torch.optim.Optimizer:
    parameters = list(made.named_parameters()) if shape.random() < 0.3 else list(made.parameters())
    kinds: list[Callable[[], torch.optim.Optimizer]] = [
        lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda: torch.optim.AdamW(parameters, lr=0.01),
        lambda: torch.optim.Adagrad(parameters),
    ]
    chosen = shape.choice(kinds)()
    for _ in range(2):
        for parameter in made.parameters():
            parameter.grad = torch.ones_like(parameter)
        chosen.step()
        chosen.zero_grad()
    return chosen


def state(shape_seed: int, value_seed: int) -> dict[str, Any]:
    """A nested state; seeds of values with one seed of the shape give states that fit each other."""
    shape, chance = random.Random(shape_seed), random.Random(value_seed)
    made: dict[str, Any] = {"step": value_seed, "t": tensor(shape, chance)}
    if shape.random() < 0.8:
        made["model"] = model(shape, chance)
        if shape.random() < 0.7:
            made["optimizer"] = optimizer(shape, made["model"])
            if shape.random() < 0.5:
                made["schedule"] = torch.optim.lr_scheduler.StepLR(made["optimizer"], 1 + chance.randrange(4))
    if shape.random() < 0.3:
        made["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0 ** chance.randrange(1, 9))
    if shape.random() < 0.6:
        made["counter"] = Counter(chance)
    if shape.random() < 0.5:
        made["nested"] = [{"a": tensor(shape, chance)}, (tensor(shape, chance), chance.random())]
    return made


# -- comparison ----------------------------------------------------------------------------------
def image(value: Any) -> Any:
    """Return a value's content, to the last bit, with the types of its parts."""
    if isinstance(value, torch.Tensor):
        packed = value.detach().clone(memory_format=torch.contiguous_format).flatten()
        return str(value.dtype), tuple(value.shape), bytes(packed.untyped_storage().tolist())
    if hasattr(value, "state_dict"):
        return type(value).__name__, image(dict(value.state_dict()))
    if isinstance(value, dict):
        # A defaultdict whose factory is a function is saved as a dict, and takes the factory of what stands there; so
        # may a dict. Renamed modules hold one weight, by either name.
        kind = dict if isinstance(value, collections.defaultdict) else type(value)
        return kind.__name__, [(repr(key).replace("kernel", "weight"), image(value[key])) for key in value]
    if isinstance(value, list | tuple):
        return type(value).__name__, [image(item) for item in value]
    return type(value).__name__, repr(value)


# -- a round -------------------------------------------------------------------------------------
def die_at(call: int) -> None:
    """End this process at its so-many-th call that changes or reads a folder."""
    left = call

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*given: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os._exit(9)
            return real(*given, **options)

        return wrapped

    for name in CALLS:
        setattr(os, name, wrap(getattr(os, name)))


def write(path: Path, made: dict[str, Any], ranks: int, death: int | None) -> int:
    """Save in another process, and return its number. It ends by 0 if the save is done, by 3 if it was refused."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        if death is not None:
            die_at(death)
        if ranks == 1:
            un.checkpoint.save(path, made)
        else:
            un.launch(lambda comm: un.checkpoint.save(path, made, comm), ranks, "thread", timeout=30)
        code = 0
    except REFUSALS:
        code = 3
    finally:
        os._exit(code)


def play(folder: Path, seed: int) -> str:
    """Play one round, and return how it ended: "loaded", "refused" or "nothing"."""
    chance = random.Random(seed)
    shape, path = chance.randrange(1 << 30), folder / "checkpoint"
    shutil.rmtree(path, ignore_errors=True)
    earlier = chance.random() < 0.5
    states = [state(shape, chance.randrange(1 << 30)) for _ in range(chance.choice([1, 1, 2, 3]) + earlier)]
    ranks = [chance.choice([1, 1, 1, 2]) for _ in states]
    done = 0
    if earlier:
        assert os.waitpid(write(path, states[0], ranks[0], None), 0)[1] == 0, "a lone save has failed"
        done = 1
    deaths = [chance.randrange(1, 120) if chance.random() < 0.4 else None for _ in states]
    writers = [write(path, *each) for each in list(zip(states, ranks, deaths, strict=True))[earlier:]]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in writers]
    assert set(codes) <= {0, 3, 9}, f"writers have ended by {codes}"
    done += codes.count(0)
    fits = chance.random() < 0.8
    target = state(shape if fits else chance.randrange(1 << 30), chance.randrange(1 << 30))
    aside = copy.deepcopy(image(target))
    error: Exception | None = None
    try:
        loaded = un.checkpoint.load(path, target)
    except REFUSALS as raised:
        error = raised
    if error is not None:
        assert image(target) == aside, f"an error has left changes: {error}"
        nothing = not path.exists() or un.checkpoint.latest(folder) is None
        refuses = any(getattr(part, "refuses", False) for part in parts(target))
        assert refuses or not fits or (nothing and not done), f"{done} saves are done, and none loads: {error}"
        return "nothing" if nothing else "refused"
    writer = next(each for each in states if each["step"] == loaded["step"])
    # A state of another kind takes what it has a place for.
    assert not fits or image(loaded) == image(writer), "what was loaded is not what one writer has saved"
    return "loaded"


def parts(made: dict[str, Any]) -> list[Any]:
    return [*made.values(), *(made["model"].modules() if "model" in made else [])]


def rounds(folder: Path, first: int, count: int) -> dict[str, int]:
    """Play rounds by their seeds, and count how they ended."""
    found: collections.Counter[str] = collections.Counter()
    for seed in range(first, first + count):
        try:
            found[play(folder, seed)] += 1
        except BaseException as error:
            error.add_note(f"in the round of seed {seed}")
            raise
    return dict(found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(rounds(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
